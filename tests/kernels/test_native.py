"""The compiled sources: which types they use, and what they may not need."""

import math
import re
from importlib import import_module

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from det_lightning.arithmetic.elementary import FUNCTIONS
from det_lightning.kernels.cpu.native import compiler, digits

KERNELS = {
    "digits": ["normalise_states", "finalize_states"],
    "scan": ["scan_rows"],
    "bands": ["integers_block"],
    "amx_products": ["amx_products_block"],
    "gemm": ["gemm_block", "gemm_digits_block"],
    "reduction": ["sum_block"],
    "binned_sum": ["sum_parts_block"],
    "residues_int8": ["int8_residues_block", "int8_operands_block"],
    "scatter": ["group_block", "add_groups_block", "round_groups_block"],
    "windowed_digits": ["bounds_block", "from_states_block", "add_to_states_block", "grow_block"],
    "windowed_rounding": ["round_block", "carry_block"],
    "digest": ["lanes_block", "float64_lanes_block"],
    "residues": ["residues_block", "reduce_block"],
    "elementary": [f"{name}_block" for name in FUNCTIONS],
}
INTEGER_FAMILIES = ["digits", "bands", "gemm", "reduction", "digest"]
FLOAT_FAMILIES = ("residues", "rebuild", "double_double", "elementary", "elementary_pairs", "elementary_short")
"""Here floats are meant: integers below 2^53, and the elementary functions."""


def dispatchers(family: str) -> dict:
    """Every compiled function that a family defines or imports, by name."""
    module = import_module(f"det_lightning.kernels.cpu.native.{family}")
    found = {}
    pending = [module]
    while pending:
        for name, value in vars(pending.pop()).items():
            if hasattr(value, "py_func") and name not in found:
                found[name] = value
                pending.append(import_module(value.py_func.__module__))
    return found


def types_used(dispatcher) -> list[str]:
    """The type of every variable and call in the overloads compiled so far; scratch memory handed on does not count."""
    used = []
    for overload in dispatcher.overloads.values():
        annotation = overload.type_annotation
        used += [str(kind) for kind in annotation.typemap.values()]
        used += [str(signature) for signature in annotation.calltypes.values() if signature is not None]
    scratch = r"array\(float64, 1d, C\)|Array\(float64, 1, 'C', False, aligned=True\)"
    return [re.sub(scratch, "scratch", kind) for kind in used]


@pytest.mark.parametrize("family", INTEGER_FAMILIES)
def test_no_float_and_no_unsigned_integer_appears_in_integer_kernels(family):
    for name in KERNELS[family]:
        compiler.object_code(family, name)
    checked = 0
    for name, dispatcher in dispatchers(family).items():
        used = types_used(dispatcher)
        checked += bool(used)
        if dispatcher.py_func.__module__.endswith(FLOAT_FAMILIES):
            continue
        assert [kind for kind in used if re.search(r"float|uint", kind)] == [], name
    assert checked > len(KERNELS[family])


def test_a_float_among_integers_is_seen_by_the_same_check():
    @numba.njit
    def halved(a):
        return a / 2

    halved(3)
    assert [kind for kind in types_used(halved) if re.search(r"float|uint", kind)] != []


@pytest.mark.parametrize("family", KERNELS)
def test_every_kernel_takes_integers_and_addresses_only(family):
    module = import_module(f"det_lightning.kernels.cpu.native.{family}")
    for name in KERNELS[family]:
        parameters = getattr(module, name).py_func.__code__.co_varnames
        assert parameters[:2] == ("start", "stop")


@pytest.mark.parametrize(
    ("body", "symbol"),
    [
        (lambda start, stop, n: math.exp(n), "exp"),
        (lambda start, stop, n: math.lgamma(n), "lgamma"),
        (lambda start, stop, n: math.sin(n), "sin"),
    ],
    ids=["exp", "lgamma", "sin"],
)
def test_a_kernel_that_calls_a_library_is_refused(body, symbol, monkeypatch):
    monkeypatch.setattr(digits, "calling", compiler.kernel(body), raising=False)
    with pytest.raises(RuntimeError, match=rf"kernel digits.calling needs \[.*{symbol}"):
        compiler.object_code("digits", "calling")


@intrinsic
def fused(typing_context, a, b, c):
    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


def test_a_kernel_with_a_fused_rounding_is_refused(monkeypatch):
    body = compiler.kernel(lambda start, stop, n: np.int64(fused(float(n), 3.0, 0.1)))
    monkeypatch.setattr(digits, "fusing", body, raising=False)
    with pytest.raises(RuntimeError, match=r"kernel digits.fusing needs \['llvm.fma.f64'"):
        compiler.object_code("digits", "fusing")


def test_the_launcher_of_scans_knows_the_constants_of_the_kernel():
    from det_lightning.kernels.cpu import scan as launcher
    from det_lightning.kernels.cpu.native import bands

    assert (launcher.BAND_BITS, launcher.LONG, launcher.PLACES) == (bands.BAND_BITS, bands.LONG, bands.SCAN_PLACES)
