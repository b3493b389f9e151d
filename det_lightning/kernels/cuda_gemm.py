"""The exact products: residues on tensor cores, and the long accumulator for what they leave undecided.

The twin of `cpu.gemm`: the same functions, the same bits. `cuda_engine` says which tensor cores take a product, and
`cuda_paths` which kernels. Nothing here waits for the device, so a product can be captured in a CUDA graph. What a call
site needs is prepared at its first call and kept by each thread: a later call allocates, writes six numbers and launches.
"""

import itertools
import threading
from collections.abc import Iterator

import torch

from ..arithmetic.formats import NB, Format
from ..errors import InputError
from . import cuda_planner, cuda_reduction
from .cuda import DTYPES, FORMAT_CODES, launch, plain
from .cuda_engine import ENGINES, engine_of
from .cuda_layout import Sizes, ceil_div, most_terms
from .cuda_paths import Form, Prepared, path_of, prepare

WORKSPACE_BYTES = 1 << 30
"""Scratch memory of one product; larger ones are cut into tiles, and into parts of the terms."""

_LONG_THREADS = 128
_FEWEST_PRODUCTS = 1 << 15
"""Smaller products take the long accumulator."""

_FEWEST_TERMS = 1 << 16
"""A product of so many terms is not cut into parts of them."""

_MOST_SITES = 1024
"""Prepared call sites a thread keeps."""

# Barriers of `cuda_src/residue_whole.cu`. A call takes the next of the first ones: thousands of calls lie between two that
# share one. A captured call, which may be replayed at any time, keeps one of the others; when they are used up, captured
# products take other kernels.
_ROUND_BARRIERS, _BARRIERS = 4096, 8192
_round_barriers, _captured_barriers = itertools.count(), itertools.count(_ROUND_BARRIERS)


class _Site:
    """One call site: operands of these shapes, strides and formats."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias_code: int,
        out: str,
        workspace_bytes: int,
        path: str | None,
        engine: str,
    ):
        self.device = x.device
        self.index = x.device.index
        batches = x.shape[0] if x.dim() == 3 else 1
        self.sizes = Sizes(batches, x.shape[-2], w.shape[-2], x.shape[-1])
        batch_strides = (x.stride(0), w.stride(0)) if x.dim() == 3 else (0, 0)
        self.form = Form(
            FORMAT_CODES[x.dtype], x.stride(-2), batch_strides[0], FORMAT_CODES[w.dtype], w.stride(-2), batch_strides[1],
            bias_code, out,
        )  # fmt: skip
        self.engine = engine
        self.path = "steps" if engine == "float64" else path or path_of(self.index, self.sizes, self.form)
        self._workspace_bytes = workspace_bytes
        self._prepared: dict[tuple[int, str], Prepared] = {}
        names = cuda_planner.Site(self.index, *self.sizes, x.dtype, w.dtype, out, self.path, engine)
        self.plan = cuda_planner.plan_of(names)

    def prepared(self, moduli: int, path: str) -> Prepared:
        found = self._prepared.get((moduli, path))
        if found is None:
            found = prepare(self.index, self.sizes, self.form, moduli, path, self._workspace_bytes, self.engine)
            self._prepared[moduli, path] = found
        return found

    def run(self, x: torch.Tensor, w: torch.Tensor, bias_at: int, out_at: int, moduli: int | None) -> None:
        """Queue the product. `out_at`: where it goes."""
        plan = self.plan
        guess = moduli or plan.next_call()
        ready = self.prepared(guess, self.path)
        barrier = 0
        if ready.needs_barrier:
            if not torch.cuda.is_current_stream_capturing():
                barrier = next(_round_barriers) % _ROUND_BARRIERS
            elif (barrier := next(_captured_barriers)) >= _BARRIERS:
                ready = self.prepared(guess, "steps")
        memory = torch.empty(ready.bytes, dtype=torch.uint8, device=self.device)
        x_at, w_at, at = x.data_ptr(), w.data_ptr(), memory.data_ptr()
        for chain, of_x, of_w, of_bias, of_out in ready.chains:
            chain.launch(x_at + of_x, w_at + of_w, bias_at and bias_at + of_bias, out_at + of_out, at, barrier)
        if moduli is None and plan.wants_counts() and not torch.cuda.is_current_stream_capturing():
            plan.send(memory[: 8 * len(ready.chains)].view(torch.int32), guess, ready.counted)


class _Known(threading.local):
    """The call sites of a thread, by everything that tells them apart."""

    def __init__(self):
        self.sites: dict[tuple, tuple[_Site, torch.Size, torch.dtype]] = {}


_known = _Known()


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise InputError(
            f"det_gemm: engine is {engine!r}; for CUDA tensors allowed: {', '.join(ENGINES)}; all give the same bits"
        )


def _takes_residues(x: torch.Tensor, w: torch.Tensor, engine: str) -> bool:
    products = x.numel() * w.shape[-2]
    return products > 0 and (engine in ("int8", "float64") or (engine == "auto" and products >= _FEWEST_PRODUCTS))


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """With unit stride in the last dimension and no lazy negation."""
    if tensor.is_neg():
        tensor = plain(tensor)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.detach().contiguous()
    return tensor


def _site_of(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: str,
    workspace_bytes: int,
    path: str | None,
    engine: str,
) -> _Site:
    index = x.get_device()
    if engine == "auto":
        engine = engine_of(index)
    bias_code = -1 if bias is None else FORMAT_CODES[bias.dtype]
    key = (
        x.shape, x.stride(), x.dtype, w.shape, w.stride(), w.dtype, bias_code, out, index, workspace_bytes, path, engine
    )  # fmt: skip
    site = _known.sites.get(key)
    if site is None:
        if len(_known.sites) >= _MOST_SITES:
            _known.sites.clear()
        site = _known.sites[key] = _Site(x, w, bias_code, out, workspace_bytes, path, engine)
    return site


def default_engine(like: torch.Tensor) -> str:
    """What "auto" takes for large products on the device of `like`: "int8" or "float64"."""
    return engine_of(like.get_device())


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    form: Format,
    engine: str = "auto",
    *,
    moduli: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    path: str | None = None,
) -> torch.Tensor:
    """The rounded products [M, N] of `ops.gemm.det_gemm`, or [B, M, N] of x [B, M, K] and w [B, N, K], on checked
    arguments. `engine`, `moduli`, `workspace_bytes` and `path` (of `cuda_paths.PATHS`, for int8) change the time only."""
    _check_engine(engine)
    out = torch.empty((*x.shape[:-1], w.shape[-2]), dtype=DTYPES[form], device=x.device)
    if bias is not None:
        bias = plain(bias).contiguous()
    if _takes_residues(x, w, engine):
        x, w = in_rows(x), in_rows(w)
        if _terms_a_part(x, engine, workspace_bytes) < x.shape[-1]:
            return _by_digits(x, w, bias, form, engine, moduli, workspace_bytes, out)
        site = _site_of(x, w, bias, form.name, workspace_bytes, path, engine)
        site.run(x, w, 0 if bias is None else bias.data_ptr(), out.data_ptr(), moduli)
    elif out.numel():
        bias_at, bias_code = (0, 0) if bias is None else (bias.data_ptr(), FORMAT_CODES[bias.dtype])
        for one_x, one_w, one_out in zip(_matrices(x), _matrices(w), _matrices(out), strict=True):
            launch(
                out.device, "gemm", "gemm", (ceil_div(one_out.numel(), 4),), _LONG_THREADS,
                one_x.data_ptr(), FORMAT_CODES[x.dtype], one_w.data_ptr(), FORMAT_CODES[w.dtype], bias_at, bias_code,
                one_out.data_ptr(), FORMAT_CODES[out.dtype], *one_out.shape, x.shape[-1],
            )  # fmt: skip
    return out


def _terms_a_part(x: torch.Tensor, engine: str, workspace_bytes: int) -> int:
    """As many terms as keep the smallest tile within `workspace_bytes`, by the usual number of moduli."""
    terms = x.shape[-1]
    if terms <= _FEWEST_TERMS:
        return terms
    if engine == "auto":
        engine = engine_of(x.get_device())
    return max(_FEWEST_TERMS, most_terms(engine, workspace_bytes))


def _by_digits(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    form: Format,
    engine: str,
    moduli: int | None,
    workspace_bytes: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """A product of very many terms: the digits of some rows at a time, which parts of the terms are added to."""
    columns = w.shape[-2]
    height = max(1, workspace_bytes // (8 * NB * columns))
    for b, one_out in enumerate(out if out.dim() == 3 else out.unsqueeze(0)):
        one_x, one_w = (x[b], w[b]) if x.dim() == 3 else (x, w)
        for rows, rounded in zip(one_x.split(height), one_out.split(height), strict=True):
            digits = torch.zeros((rows.shape[0], columns, NB), dtype=torch.int64, device=x.device)
            if bias is not None:
                digits += cuda_reduction.sum_states(bias.view(1, 1, -1))
            add_gemm_digits(digits, rows, one_w, engine, moduli=moduli, workspace_bytes=workspace_bytes)
            rounded.copy_(cuda_reduction.finalize(cuda_reduction.normalise(digits), form, 1))
    return out


def _matrices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The contiguous matrices of a batch, or of one matrix."""
    matrices = tensor if tensor.dim() == 3 else (tensor,)
    return (plain(matrix).contiguous() for matrix in matrices)


def add_gemm_digits(
    digits: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    engine: str = "auto",
    *,
    moduli: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """digits [M, N, NB] += the products, on checked arguments; `digits` is contiguous. Each digit moves by less than
    2^32; a sum that starts at zero is not canonical before `cuda_reduction.normalise`."""
    _check_engine(engine)
    if _takes_residues(x, w, engine):
        x, w = in_rows(x), in_rows(w)
        terms = _terms_a_part(x, engine, workspace_bytes)
        if terms < x.shape[1]:
            for of_x, of_w in zip(x.split(terms, 1), w.split(terms, 1), strict=True):
                cuda_reduction.normalise(
                    digits
                )  # a digit of a canonical state is below 2^32, so all parts move it by less
                add_gemm_digits(digits, of_x, of_w, engine, moduli=moduli, workspace_bytes=workspace_bytes)
            return
        site = _site_of(x, w, None, "digits", workspace_bytes, "steps", engine)
        site.run(x, w, 0, digits.data_ptr(), moduli)
    elif digits.numel() and x.shape[1]:
        (x,), (w,) = _matrices(x), _matrices(w)
        rows, (columns, terms) = x.shape[0], w.shape
        height = max(1, workspace_bytes // (8 * NB * columns))
        for i in range(0, rows, height):
            partial = torch.empty((min(height, rows - i), columns, NB), dtype=torch.int64, device=x.device)
            launch(
                x.device, "gemm", "gemm_partial", (ceil_div(partial.shape[0] * columns, 4),), _LONG_THREADS,
                x[i:].data_ptr(), FORMAT_CODES[x.dtype], w.data_ptr(), FORMAT_CODES[w.dtype],
                partial.data_ptr(), partial.shape[0], columns, terms,
            )  # fmt: skip
            digits[i : i + height] += partial
