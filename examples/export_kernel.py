"""Writes the exact operations as a kernel for the `kernels` library: `python examples/export_kernel.py [FOLDER]`.

FOLDER/build/torch-universal/ then holds the operations, their CPU and CUDA kernels and `metadata.json`; FOLDER is `.` unless
it is given. `kernels.get_local_kernel(Path(FOLDER))` loads it without a network and without det-lightning installed. It
needs torch, numpy, numba and llvmlite; on CUDA also NVRTC, which it looks for at the first product.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "det_lightning"
VARIANT = Path("build", "torch-universal")
VERSION = 1

FOLDERS = ("arithmetic", "kernels", "ops")
"""Packages that import one another relatively, and nothing else of det_lightning but `errors`."""

FILES = ("errors.py", "layers/linear.py", "distributed/__init__.py", "distributed/all_reduce.py")

INIT = '''"""Exact training arithmetic: sums and products whose bits do not depend on how the work is split."""

from . import layers
from .distributed.all_reduce import det_all_reduce
from .layers import DetLinear
from .ops.digits import det_combine, det_finalize
from .ops.gemm import det_gemm, det_gemm_partial
from .ops.reduction import det_sum

__all__ = [
    "DetLinear",
    "det_all_reduce",
    "det_combine",
    "det_finalize",
    "det_gemm",
    "det_gemm_partial",
    "det_sum",
    "layers",
]
'''
LAYERS_INIT = '''"""Modules that replace those of torch."""

from .linear import DetLinear

__all__ = ["DetLinear"]
'''


def digest_of(folder: Path) -> str:
    """Hex digest of the names and contents of all files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def metadata(content_digest: str) -> dict:
    """What the loader asks of a variant. CUDA's compiler is found at run time, so no dependency is declared."""
    return {
        "name": "det-lightning",
        "id": f"_det_lightning_{content_digest[:12]}",
        "version": VERSION,
        "license": "Apache-2.0",
        "backend": {"type": "cpu"},
        "python-depends": [],
    }


def export(target: Path) -> Path:
    """Writes `target`/build/torch-universal, in place of an earlier one, and returns it."""
    variant = target / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    leave_out = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(PACKAGE / name, variant / name, ignore=leave_out)
    shutil.copytree(ROOT / "cuda_src", variant / "cuda_src", ignore=leave_out)
    for name in FILES:
        (variant / name).parent.mkdir(exist_ok=True)
        shutil.copy(PACKAGE / name, variant / name)
    (variant / "__init__.py").write_text(INIT, encoding="utf-8")
    (variant / "layers" / "__init__.py").write_text(LAYERS_INIT, encoding="utf-8")
    text = json.dumps(metadata(digest_of(variant)), indent=2)
    (variant / "metadata.json").write_text(text + "\n", encoding="utf-8")
    return variant


if __name__ == "__main__":
    print(export(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
