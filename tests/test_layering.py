"""The law of the layout: imports point down only, and each outside library has few importers."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    {"errors"},
    {"arithmetic"},
    {"kernels", "cuda_src"},
    {"ops"},
    {"layers", "optim"},
    {"distributed", "ledger"},
    {"strategies", "callbacks"},
    {"replay", "bisection"},
    {"cli", "demo", "__init__", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS, 1) for name in names}
STRANGERS = {
    ("distributed", "ledger"),
    ("ledger", "distributed"),
}  # of one layer, and neither may know the other

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
LIGHTNING_USERS = ("strategies.", "callbacks.", "replay.", "demo.")
TORCH_FREE = ("arithmetic.", "bisection.", "ledger.")
TORCH_IN_LEDGER = "ledger.digest."  # digests of tensors; comparing ledgers never needs it


def imports_of(text: str, module: str, is_package: bool) -> set[str]:
    """Full names of what the source of `module` imports, wherever in it; root names count as modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "det_lightning" else {base}
    return found


def violations(text: str, module: str, is_package: bool = False) -> list[str]:
    """What the source of `module` imports against the law, one sentence each."""
    inside = module.removeprefix("det_lightning.") + "."
    own = inside.split(".")[0] if module != "det_lightning" else "__init__"
    wrong = []
    for imported in imports_of(text, module, is_package):
        library, _, rest = imported.partition(".")
        if library == "det_lightning":
            other = rest.split(".")[0] or "__init__"
            other = other if other in RANK else "__init__"  # a public name is taken from the root
            if RANK[other] > RANK[own] or (own, other) in STRANGERS:
                wrong.append(f"{module} imports {imported}, which lies above it or beside it")
        if library == "numba" and not inside.startswith("kernels.cpu."):
            wrong.append(f"{module} imports numba; only kernels/cpu/ may")
        if library in {"cupy", "cupy_backends"} and not inside.startswith("kernels.cuda"):
            wrong.append(f"{module} imports {library}; only kernels/cuda* may")
        if library in LIGHTNING and not inside.startswith(LIGHTNING_USERS):
            wrong.append(f"{module} imports {library}; only strategies, callbacks, replay and demo may")
        if library == "torch" and inside.startswith(TORCH_FREE) and inside != TORCH_IN_LEDGER:
            wrong.append(f"{module} imports torch; it must work without")
        if library in {"callbacks", "cuda_src"}:
            wrong.append(f"{module} imports {library}; its name is det_lightning.{library}")
    return wrong


def product_files() -> list[tuple[Path, str]]:
    """Every Python file that is shipped, with its module name."""
    files = []
    for folder, prefix in (
        ("det_lightning", []),
        ("callbacks", ["det_lightning"]),
        ("cuda_src", ["det_lightning"]),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*prefix, *path.relative_to(ROOT).with_suffix("").parts]
            files.append((path, ".".join(parts).removesuffix(".__init__")))
    return files


def test_every_room_has_a_layer():
    rooms = {module.split(".")[1] for _, module in product_files() if "." in module}
    assert rooms <= set(RANK), f"give {rooms - set(RANK)} a layer in LAYERS"


@pytest.mark.parametrize(("path", "module"), [pytest.param(*file, id=file[1]) for file in product_files()])
def test_imports_point_down(path, module):
    assert violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("det_lightning.arithmetic.rounding", "from ..ops import gemm"),
        ("det_lightning.arithmetic.rounding", "from .. import ops"),
        ("det_lightning.arithmetic.rounding", "import torch"),
        ("det_lightning.ops.gemm", "def f():\n    from det_lightning.layers.linear import DetLinear"),
        ("det_lightning.ops.gemm", "from det_lightning import DetLinear"),
        ("det_lightning.ops.gemm", "import numba.core"),
        ("det_lightning.kernels.cpu.gemm", "import cupy"),
        ("det_lightning.ledger.digest", "from det_lightning.distributed.reducer import Reducer"),
        ("det_lightning.ledger.compare", "from torch import Tensor"),
        ("det_lightning.optim.sgd", "import lightning.pytorch as pl"),
        ("det_lightning.strategies.det", "from callbacks.weight_ledger import WeightLedger"),
    ],
)
def test_the_law_sees_a_breach(module, text):
    assert len(violations(text, module)) == 1
