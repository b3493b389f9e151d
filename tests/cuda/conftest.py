"""The kernels as they are shipped, on host arrays of bits: every call copies in, launches, and copies out."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pkgutil import iter_modules

import numpy as np
import pytest

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, NB

torch = pytest.importorskip("torch")

from det_lightning.kernels import cpu, cuda, cuda_digest, cuda_gemm, cuda_paths, cuda_reduction  # noqa: E402
from det_lightning.kernels.cpu import amx, machine_code  # noqa: E402
from det_lightning.kernels.cuda import FORMAT_CODES, launch  # noqa: E402
from det_lightning.kernels.cuda_layout import Sizes  # noqa: E402
from det_lightning.kernels.cuda_paths import Form  # noqa: E402

from . import emulator as emulation  # noqa: E402

BITS = {FLOAT32: np.uint32, BFLOAT16: np.uint16, FLOAT16: np.uint16}
SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
DEVICE = "cuda:0"


def from_bits(bits: np.ndarray, form=None, device="cpu") -> "torch.Tensor":
    """The tensor with these patterns; of integers if no format is given."""
    bits = np.ascontiguousarray(bits)
    tensor = torch.from_numpy(bits.view(SIGNED[bits.itemsize]).copy())
    return (tensor if form is None else tensor.view(DTYPES[form])).to(device)


def to_bits(tensor: "torch.Tensor") -> np.ndarray:
    holder = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    array = tensor.cpu().contiguous().view(holder).numpy()
    return array if array.itemsize == 8 else array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


class Kernels:
    def gemm_partial(self, x, x_form, w, w_form) -> np.ndarray:
        """Digits int64 [M, N, 21] of bits x: [M, K], w: [N, K], by the long accumulator."""
        digits = torch.zeros((len(x), len(w), NB), dtype=torch.int64, device=DEVICE)
        x, w = from_bits(x, x_form, DEVICE), from_bits(w, w_form, DEVICE)
        cuda_gemm.add_gemm_digits(digits, x, w, "long_accumulator")
        return digits.cpu().numpy()

    def gemm(self, x, x_form, w, w_form, out_form, bias=None, bias_form=FLOAT32) -> np.ndarray:
        """Bits [M, N] of out_form, by the long accumulator."""
        bias = None if bias is None else from_bits(bias, bias_form, DEVICE)
        x, w = from_bits(x, x_form, DEVICE), from_bits(w, w_form, DEVICE)
        return to_bits(cuda_gemm.gemm(x, w, bias, out_form, "long_accumulator"))

    def digits_normalise(self, digits) -> np.ndarray:
        return cuda_reduction.normalise(from_bits(digits, device=DEVICE)).cpu().numpy()

    def digits_add(self, states) -> np.ndarray:
        total = from_bits(states[0], device=DEVICE)
        for state in states[1:]:
            addend = from_bits(state, device=DEVICE)
            blocks = (-(-total.numel() // 128),)
            launch(
                total.device, "digits", "digits_add", blocks, 128, total.data_ptr(), addend.data_ptr(), total.numel()
            )
        return total.cpu().numpy()

    def digits_finalize(self, digits, denominator, out_form) -> np.ndarray:
        return to_bits(cuda_reduction.finalize(from_bits(digits, device=DEVICE), out_form, denominator))

    def sum_states(self, x, form, dim, squares=False) -> np.ndarray:
        """Canonical digits of the sum of bits x over `dim`, or the state of all squares."""
        x = from_bits(x, form, DEVICE)
        if squares:
            return cuda_reduction.sum_of_squares_state(x).cpu().numpy()
        sizes = x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel()
        return cuda_reduction.sum_states(x.reshape(sizes)).cpu().numpy()

    def tensor_digest(self, elements, code, first_element=0) -> tuple[int, int]:
        lanes = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        data = from_bits(elements, device=DEVICE)
        launch(
            lanes.device, "tensor_digest", "tensor_digest", (7,), 128,
            data.data_ptr(), code, elements.size, first_element, lanes.data_ptr(),
        )  # fmt: skip
        return tuple(lane % 2**64 for lane in lanes.tolist())

    def lanes(self, tensor) -> tuple[int, int]:
        return cuda_digest.tensor_lanes(tensor.to(DEVICE))


def _compile_for_cpu(kernel: tuple[str, str]) -> None:
    machine_code._object_code(*kernel)


def _kernels_of_cpu() -> list[tuple[str, str]]:
    """Family and name of every kernel of the CPU, to whose results the device's are compared."""
    found = set()
    for module in (import_module(f"{cpu.__name__}.{one.name}") for one in iter_modules(cpu.__path__) if not one.ispkg):
        for value in vars(module).values():
            several = value.values() if isinstance(value, dict) else (value,)
            found |= {(one.family, one.name) for one in several if isinstance(one, machine_code.Kernel)}
    return sorted(kernel for kernel in found if amx.is_available() or "amx" not in kernel[0])


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    """The kernels, all of them compiled at once, and a CPU that may use all of its cores."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(os.cpu_count() // 2 or 1, mp_context=get_context("spawn")) as pool:
        on_cpu = pool.map(_compile_for_cpu, _kernels_of_cpu())
        cuda.compile_ahead(0, cuda_paths.variants())
        list(on_cpu)
    torch.set_num_threads(max(threads, os.cpu_count() // 2))
    yield Kernels()
    torch.set_num_threads(threads)


GUARD_BYTES = 4096


def guarded(count: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """So many bytes of what nobody meant, and all of the memory around them, which nothing may write to."""
    memory = torch.full((count + 2 * GUARD_BYTES,), 0x55, dtype=torch.uint8)
    return memory[GUARD_BYTES : GUARD_BYTES + count], memory


def check_guards(*memories: "torch.Tensor") -> None:
    for memory in memories:
        assert bool((memory[:GUARD_BYTES] == 0x55).all() and (memory[-GUARD_BYTES:] == 0x55).all()), "written outside"


@pytest.fixture(scope="session")
def emulator(tmp_path_factory) -> emulation.Emulator:
    if emulation.COMPILER is None:
        pytest.skip("no g++ since 12")
    return emulation.Emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def emulated_product(emulator, monkeypatch):
    """(operands, what to write, how) -> the result of the emulated kernels."""
    monkeypatch.setattr(cuda_paths, "Chain", emulator.chain)
    monkeypatch.setattr(cuda_paths, "capability", lambda index: (8, 0))
    monkeypatch.setattr(cuda_paths, "multiprocessors", lambda index: 1)
    monkeypatch.setattr(cuda_paths, "most_shared_bytes", lambda index: 1 << 18)

    def product(
        x, w, out, bias=None, engine="float64", moduli=12, workspace_bytes=1 << 30, path="steps", leave_out=None,
        disorder=0,
    ) -> torch.Tensor:  # fmt: skip
        x, w = cuda_gemm.in_rows(x), cuda_gemm.in_rows(w)
        batches = x.shape[0] if x.dim() == 3 else 1
        sizes = Sizes(batches, x.shape[-2], w.shape[-2], x.shape[-1])
        strides = [(t.stride(-2), t.stride(0) if t.dim() == 3 else 0) for t in (x, w)]
        bias_code = -1 if bias is None else FORMAT_CODES[bias.dtype]
        name = "digits" if out == "digits" else out.name
        form = Form(FORMAT_CODES[x.dtype], *strides[0], FORMAT_CODES[w.dtype], *strides[1], bias_code, name)
        ready = cuda_paths.prepare(0, sizes, form, moduli, path, workspace_bytes, engine)
        shape = (*x.shape[:-1], w.shape[-2], *((NB,) if out == "digits" else ()))
        dtype = torch.int64 if out == "digits" else DTYPES[out]
        result, around = guarded(shape_bytes(shape, dtype))
        result = result.view(dtype).view(shape)
        if out == "digits":
            result.zero_()
        memory, around_memory = guarded(ready.bytes)
        bias_at = 0 if bias is None else bias.data_ptr()
        for chain, of_x, of_w, of_bias, of_out in ready.chains:
            chain.calls, chain.disorder = [call for call in chain.calls if call.kernel != leave_out], disorder
            chain.launch(
                x.data_ptr() + of_x, w.data_ptr() + of_w, bias_at and bias_at + of_bias, result.data_ptr() + of_out,
                memory.data_ptr(), 0,
            )  # fmt: skip
        check_guards(around, around_memory)
        return result

    return product


def shape_bytes(shape: tuple[int, ...], dtype: "torch.dtype") -> int:
    return torch.Size(shape).numel() * dtype.itemsize
