"""Loads the kernels of `cuda_src/` as they are shipped: NVRTC to a cubin, the cubin into CuPy."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, NB
from det_lightning.kernels import cuda_compile

# The kernels' codes of the formats, and the NumPy type that holds their bits.
FORMATS = (FLOAT32, BFLOAT16, FLOAT16)
BITS = {FLOAT32: np.uint32, BFLOAT16: np.uint16, FLOAT16: np.uint16}
THREADS = 128


@dataclass(frozen=True)
class Kernels:
    """The kernels on host arrays of bits: every call copies in, launches, and copies out."""

    cupy: object
    folder: Path

    @cache  # noqa: B019
    def function(self, source_name: str, kernel_name: str):
        capability = f"sm_{self.cupy.cuda.Device().compute_capability}"
        source = cuda_compile.SOURCE_FOLDER / source_name
        path = self.folder / f"{source.stem}.{capability}.cubin"
        if not path.exists():
            path.write_bytes(cuda_compile.compile_cubin(source, capability))
        return self.cupy.RawModule(path=str(path)).get_function(kernel_name)

    def launch(self, source_name, kernel_name, grid, *arguments, threads=THREADS):
        self.function(source_name, kernel_name)(grid, (threads,), arguments)
        self.cupy.cuda.runtime.deviceSynchronize()

    def out(self, shape, dtype):
        """Device memory filled with a pattern that no correct result leaves behind."""
        array = self.cupy.empty(shape, dtype)
        array.view(self.cupy.uint8).fill(0xA5)
        return array

    def gemm_partial(self, x, x_form, w, w_form) -> np.ndarray:
        """Digits int64 [M, N, 21] of bits x: [M, K], w: [N, K]."""
        (rows, depth), columns = x.shape, w.shape[0]
        digits = self.out((rows, columns, NB), np.int64)
        operands = (*self.operand(x, x_form), *self.operand(w, w_form))
        shape = (np.int64(rows), np.int64(columns), np.int32(depth))
        self.launch("gemm.cu", "gemm_partial", (-(-rows * columns // 4),), *operands, digits, *shape)
        return digits.get()

    def gemm(self, x, x_form, w, w_form, out_form, bias=None, bias_form=FLOAT32) -> np.ndarray:
        """Bits [M, N] of out_form."""
        (rows, depth), columns = x.shape, w.shape[0]
        out = self.out((rows, columns), BITS[out_form])
        operands = (*self.operand(x, x_form), *self.operand(w, w_form), *self.operand(bias, bias_form))
        tail = (out, self.code(out_form), np.int64(rows), np.int64(columns), np.int32(depth))
        self.launch("gemm.cu", "gemm", (-(-rows * columns // 4),), *operands, *tail)
        return out.get()

    def digits_normalise(self, digits) -> np.ndarray:
        state = self.cupy.asarray(digits)
        count = state.size // NB
        self.launch("digits.cu", "digits_normalise", (-(-count // THREADS),), state, np.int64(count))
        return state.get()

    def digits_add(self, states) -> np.ndarray:
        total = self.cupy.asarray(states[0])
        for state in states[1:]:
            grid = (-(-total.size // THREADS),)
            self.launch("digits.cu", "digits_add", grid, total, self.cupy.asarray(state), np.int64(total.size))
        return total.get()

    def digits_finalize(self, digits, denominator, out_form) -> np.ndarray:
        count = digits.size // NB
        out = self.out(digits.shape[:-1], BITS[out_form])
        arguments = (
            self.cupy.asarray(digits),
            np.int64(denominator),
            out,
            self.code(out_form),
            np.int64(count),
        )
        self.launch("digits.cu", "digits_finalize", (-(-count // THREADS),), *arguments)
        return out.get()

    def sum_partial(self, x, form, dim, chunks, kernel_name="sum_partial") -> np.ndarray:
        """Canonical digits of the sum of bits x over `dim`."""
        outer, length, inner = (int(np.prod(part)) for part in (x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]))
        digits = self.cupy.zeros((*x.shape[:dim], *x.shape[dim + 1 :], NB), np.int64)
        arguments = (*self.operand(x, form), digits, np.int64(length), np.int64(inner))
        self.launch("reduction.cu", kernel_name, (outer * inner, chunks), *arguments)
        return self.digits_normalise(digits.get())

    def tensor_digest(self, elements, code, first_element=0) -> tuple[int, int]:
        lanes = self.cupy.zeros(2, np.uint64)
        size = np.int64(elements.size)
        arguments = (self.cupy.asarray(elements), np.int32(code), size, np.int64(first_element), lanes)
        self.launch("tensor_digest.cu", "tensor_digest", (7,), *arguments)
        return tuple(int(lane) for lane in lanes.get())

    def operand(self, bits, form):
        return (np.uint64(0) if bits is None else self.cupy.asarray(bits), self.code(form))

    def code(self, form) -> np.int32:
        return np.int32(FORMATS.index(form))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> Kernels:
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device")
    return Kernels(cupy, tmp_path_factory.mktemp("cubins"))
