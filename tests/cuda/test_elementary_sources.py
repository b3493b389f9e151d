"""What the CUDA source of the functions of one variable shares with Python, and that each compiles; no GPU needed."""

import re

import pytest

pytest.importorskip("torch")

from det_lightning.arithmetic.elementary import DEFINED_BELOW_EDGE, EDGES, FUNCTIONS
from det_lightning.errors import DetError
from det_lightning.kernels import cuda_compile, cuda_elementary
from det_lightning.kernels.cpu.elementary import DOUBT

SOURCE = cuda_compile.SOURCE_FOLDER / "elementary.cu"
TEXT = SOURCE.read_text(encoding="utf-8")


def named_in(pattern: str) -> set[str]:
    """The functions named in the part of the source that `pattern` finds."""
    return {name.lower() for name in re.findall(r"FUNCTION == ([A-Z0-9_]+)", re.search(pattern, TEXT, re.DOTALL)[0])}


def test_the_codes_of_functions_are_their_order_in_python():
    listed = re.search(r"enum FunctionName \{([^}]*)\}", TEXT)[1]
    assert [name.strip().lower() for name in listed.split(",")] == list(FUNCTIONS)
    assert list(cuda_elementary.CODES) == list(FUNCTIONS)


def test_domains_and_doubts_are_those_of_python():
    assert named_in(r"POSITIVE_ONLY = .*?;") == {name for name, edge in EDGES.items() if edge == 0}
    at_minus_one = {name for name, edge in EDGES.items() if edge == 0xBF800000}
    assert named_in(r"EDGE_AT_MINUS_ONE = .*?;") == at_minus_one
    assert named_in(r"if \(FUNCTION == LOG1P\) return specials.nan") == at_minus_one - DEFINED_BELOW_EDGE
    assert named_in(r"DOUBT = .*?;") == {name for name, doubt in DOUBT.items() if doubt == 1 << 15}
    assert set(DOUBT.values()) == {32, 1 << 15}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_compiles_without_a_warning(name):
    code = cuda_elementary.CODES[name]
    # Formats in, formats out and gradients all come once in three functions.
    formats = {"IN": code % 3, "OUT": (code + 1) % 3, "GRADIENT": (3, 0, 1)[code % 3]}
    try:
        cubin, log = cuda_compile.compile_with_log(SOURCE, "sm_90", {"FUNCTION": code, **formats})
    except DetError as error:
        if "was not found" in str(error):
            pytest.skip(str(error))
        raise
    assert cubin.startswith(b"\x7fELF") and log == ""


@pytest.mark.parametrize("formats", [(0, 0), (1, 1), (2, 2), (1, 0)])
def test_sums_compile_for_every_format(formats):
    source = cuda_compile.SOURCE_FOLDER / "reduction.cu"
    try:
        cubin, log = cuda_compile.compile_with_log(
            source, "sm_90", dict(zip(("X_FORMAT", "W_FORMAT"), formats, strict=True))
        )
    except DetError as error:
        if "was not found" in str(error):
            pytest.skip(str(error))
        raise
    assert cubin.startswith(b"\x7fELF") and log == ""
