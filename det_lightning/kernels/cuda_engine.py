"""Which tensor cores multiply the residues of a product on a device: int8 or float64. The bits are the same.

int8 takes one product a modulus, up to 16; float64 one for every three moduli (`cuda_src/residue_float64.cuh`). What is
chosen for "auto" depends on the kind of device alone, so a run takes one engine from its first step to its last.
"""

import functools
import os

from ..errors import InputError
from . import cuda

ENGINES = ("auto", "int8", "float64", "long_accumulator")
VARIABLE = "DET_LIGHTNING_CUDA_ENGINE"
"""Environment variable that says what "auto" is for this process: "int8" or "float64"."""

_PRODUCTS = {"int8": 11, "float64": 4}
"""Matrix products of a usual float32 product."""

_RATES = {(8, 0): (2048, 64), (8, 6): (1024, 2), (8, 9): (1024, 2), (9, 0): (4096, 128), (10, 0): (8192, 64),
          (10, 3): (256, 2), (12, 0): (1024, 2)}  # fmt: skip
"""int8 and float64 multiply-adds a cycle and multiprocessor by compute capability, from the vendor's published rates."""


def faster_engine(int8: float, float64: float) -> str:
    """The engine with fewer seconds a product, by multiply-adds a second."""
    return "float64" if _PRODUCTS["float64"] / float64 < _PRODUCTS["int8"] / int8 else "int8"


@functools.cache
def engine_of(device_index: int) -> str:
    """What "auto" is on a device: "int8" or "float64"; devices that are not in the table take int8. Raises InputError if
    the environment variable has another value."""
    named = os.environ.get(VARIABLE)
    if named:
        if named not in _PRODUCTS:
            raise InputError(f"{VARIABLE} is {named!r}; allowed: {', '.join(_PRODUCTS)}; both give the same bits")
        return named
    rates = _RATES.get(cuda.capability(device_index))
    return faster_engine(*rates) if rates else "int8"
