"""Tables of README.md that are read from the code: the seed's claims with their tests, and what is covered."""

import ast

from benchmarks.surroundings import ROOT
from det_lightning.layers import convert
from det_lightning.optim.stepping import STEPS


def seed() -> str:
    """The claims in the docstrings of tests/claims/test_seed_card.py, each beside its test and where that runs."""
    name = "tests/claims/test_seed_card.py"
    rows = []
    for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            where = "2 processes, 2 GPUs" if "multi_gpu" in marks else "CPU, GPU"
            rows.append(f"| {ast.get_docstring(node)} | {where} | `{node.name}` |")
    return (
        f"`{name}` holds the claims of [det-train](https://huggingface.co/phanerozoic/det-train)'s card, and "
        "`tests/claims/test_exported_kernel.py` its usage code, which runs as it stands on "
        "`python examples/export_kernel.py`, loaded by `kernels.get_local_kernel`:\n\n"
        "| claim | on | test |\n|---|---|---|\n" + "\n".join(rows)
    )


def coverage() -> str:
    modules = sorted({cls.__name__ for cls in {*convert.SWAPS, *convert.COVERED}} - {"DetLinear"})
    functions = (
        "`F.linear`, `relu`, `dropout`, the losses of `torch.nn.functional` listed in "
        "[docs/training.md](docs/training.md), `.mean()`, `.sum()`, `det_lightning.exact_mean`, `+ - * /`, casts and views"
    )
    optimizers = ", ".join(f"`{cls.__name__}`" for cls in STEPS)
    return (
        "| covered in this version | |\n|---|---|\n"
        f"| modules of `torch.nn` | {', '.join(f'`{name}`' for name in modules)} |\n"
        f"| calls in `training_step` | {functions} |\n"
        f"| optimizers, by exact type | {optimizers}, with any learning rate schedule, clipping by norm or value |\n"
        "| precision | `32-true`, `bf16-true`, `bf16-mixed` |\n"
        "| data | one `DataLoader` over a map-style data set, or over a stream that declares its length and starts "
        "anywhere; shuffled or with a sampler of its own, any length; mid-epoch resume at any split |\n"
        "| loops | `Trainer`, `LightningCLI`, `Fabric` |\n"
        "| launchers | popen, spawn, fork, torchrun |"
    )
