"""Training runs as reproducible objects: exact arithmetic, exact reduction, a ledger, replay and bisect.

Importing registers `strategy="det"` with `lightning` and `pytorch_lightning`, whichever is imported before or after;
everything else is loaded at its first use.
"""

from importlib import import_module
from pathlib import Path

_here = Path(__file__).resolve().parent
if not (_here / "callbacks").is_dir() and (_here.parent / "cuda_src").is_dir():
    __path__.append(str(_here.parent))  # source tree: callbacks/ and cuda_src/ lie beside this folder

from det_lightning.strategies import registration as _registration  # noqa: E402

__version__ = "0.1.0"

_PUBLIC = {
    "DetLinear": "det_lightning.layers.linear",
    "DetStrategy": "det_lightning.strategies",
    "FabricDetStrategy": "det_lightning.strategies",
    "FaultGuard": "det_lightning.callbacks.fault_guard",
    "LedgerGuard": "det_lightning.callbacks.ledger_guard",
    "PlainLedger": "det_lightning.callbacks.plain_ledger",
    "ReplicaGuard": "det_lightning.callbacks.replica_guard",
    "WeightLedger": "det_lightning.callbacks.weight_ledger",
    "check_golden": "det_lightning.replay.golden",
    "det_all_reduce": "det_lightning.distributed.all_reduce",
    "det_combine": "det_lightning.ops.digits",
    "det_exp": "det_lightning.ops.elementary",
    "det_finalize": "det_lightning.ops.digits",
    "det_gemm": "det_lightning.ops.gemm",
    "det_gemm_partial": "det_lightning.ops.gemm",
    "det_log": "det_lightning.ops.elementary",
    "det_sum": "det_lightning.ops.reduction",
    "exact_mean": "det_lightning.ops.means",
    "random": "det_lightning.ops.random_calls",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'det_lightning' has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


_registration.install()
