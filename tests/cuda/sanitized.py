"""The smallest cases of every kernel, for `compute-sanitizer --tool memcheck|racecheck python tests/cuda/sanitized.py`.

An argument `products` or `streams` runs those kernels alone.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32, NB
from det_lightning.kernels import (
    cuda_digest,
    cuda_elementary,
    cuda_gemm,
    cuda_gemm_windowed,
    cuda_paths,
    cuda_reduction,
    cuda_scatter,
)
from det_lightning.kernels.dispatch import many_lanes
from det_lightning.ops.gemm_windowed import add_gemm_windowed, gemm_windowed
from det_lightning.ops.window_agreement import agreed_window, fill_words, needs_of_window, refill_words, window_needs
from det_lightning.ops.windowed_digits import WindowedDigits, round_sum


def streams() -> None:
    """Sums, functions of one variable, digests, sums by index, windowed digits."""
    x = torch.randn(70, 200, device="cuda")
    for data in (x, x.bfloat16(), x.half()):
        states = cuda_reduction.sum_states(data.view(1, -1, 1))
        cuda_reduction.sum_states(data.view(1, 70, 200)), cuda_reduction.sum_states(data[:, 1:].reshape(70, 199, 1))
        cuda_reduction.row_states("products", data, data), cuda_reduction.sum_of_squares_state(data)
    cuda_reduction.sum_of_squares_state(x * torch.exp2(torch.randint(-99, 60, x.shape, device="cuda").float()))
    cuda_reduction.finalize(states, FLOAT32, 3)
    for name in ("exp", "gelu", "log", "sqrt", "silu", "log1p_derivative"):
        cuda_elementary.elementwise(name, x), cuda_elementary.elementwise(name, x[:, 1:], only_pairs=True)
        cuda_elementary.elementwise(name, x.bfloat16(), BFLOAT16)
    cuda_elementary.gradient("tanh_derivative", x[:, 1:], x[:, 1:], FLOAT32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        cuda_digest.tensor_lanes(x.to(dtype))
        many_lanes([x.to(dtype), x.to(dtype)[1:, 3:], x.to(dtype)[:0]])
    index = torch.arange(700, device="cuda") % 9
    for common in (False, True):
        index = torch.where(index > 0, 3, index) if common else index  # a group of more rows than one block sums
        cuda_scatter.index_sum(None, index, x.view(700, 20), 11, FLOAT32)
        cuda_scatter.index_sum(x[:11, :20], index, x.view(700, 20), 11, BFLOAT16)
        cuda_scatter.add_index_digits(
            torch.zeros((11, 20, NB), dtype=torch.int64, device="cuda"), index, x.view(700, 20)
        )
    digits = torch.zeros((5, 20, NB), dtype=torch.int64, device="cuda")
    cuda_scatter.add_index_digits(digits, index[:100] % 5, x.view(700, 20)[:100])
    window = WindowedDigits.from_digits(digits)
    window.add_(WindowedDigits.from_digits(digits, window.base - 40, 1)).normalise_()
    window.round(), window.round(denominator=3), window.grow_(window.base - 90, 1).round(), window.to_digits()
    base, _ = agreed_window(window_needs(digits[:4]))
    words = torch.empty((2, 4, 2, 20), dtype=torch.int32, device="cuda")
    fill_words(digits[:4].contiguous(), base, words), round_sum([window, window], denominator=24)
    needs_of_window(window), refill_words(window, window.base + 3, torch.empty_like(window.words))


def products() -> None:
    x, w = torch.randn(70, 200, device="cuda"), torch.randn(130, 200, device="cuda")
    bias = torch.randn(130, device="cuda")
    digits = torch.zeros((70, 130, NB), dtype=torch.int64, device="cuda")
    for moduli in (6, 14):
        for path in ("steps", "whole"):
            cuda_gemm.gemm(x, w, None, FLOAT32, "int8", moduli=moduli, path=path)
            cuda_gemm.gemm(x.bfloat16(), w, bias, BFLOAT16, "int8", moduli=moduli, path=path)
        cuda_gemm.gemm(x, w, bias, FLOAT32, "float64", moduli=moduli)
        for engine in ("int8", "float64"):
            cuda_gemm.add_gemm_digits(digits, x, w, engine, moduli=moduli)
        for terms, form in ((60, FLOAT32), (64, BFLOAT16), (120, FLOAT32)):
            batch = x[:, :terms].expand(2, -1, -1).contiguous(), w[:, :terms].expand(2, -1, -1).contiguous()
            cuda_gemm.gemm(*batch, None, form, "int8", moduli=moduli, path="short")
    cuda_gemm.gemm(x[:, 1:], w[:, 1:], None, FLOAT32, "int8", moduli=6, workspace_bytes=1, path="steps")
    cuda_gemm.gemm(
        torch.randn(3, 2000, device="cuda"), torch.randn(2, 2000, device="cuda"), None, FLOAT32, "int8", moduli=5
    )
    small = x * torch.exp2(torch.randint(-60, 0, x.shape, device="cuda").float())
    for data in (x, small):
        add_gemm_windowed(gemm_windowed(data, w), data[:, :].flip(1), w)
        words = torch.empty((5, 70, 130), dtype=torch.int32, device="cuda")
        cuda_gemm_windowed.add(
            data, w, words, torch.empty(70, dtype=torch.int64, device="cuda"), True, engine="float64"
        )
    cuda_gemm._known.sites.clear()
    columns, cuda_paths._tile_columns = cuda_paths._tile_columns, lambda *_: 256
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", moduli=6, path="steps")
    cuda_paths._tile_columns = columns
    cuda_gemm._known.sites.clear()
    capability, cuda_paths.capability = cuda_paths.capability, lambda index: (8, 0)
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", moduli=6, path="steps")
    cuda_paths.capability = capability
    cuda_gemm.gemm(x[:9], w[:5], bias[:5], FLOAT32, "long_accumulator")
    cuda_gemm.add_gemm_digits(
        torch.zeros((9, 5, NB), dtype=torch.int64, device="cuda"), x[:9], w[:5], "long_accumulator"
    )


def main() -> None:
    torch.manual_seed(0)
    named = [parts for parts in (products, streams) if parts.__name__ in sys.argv[1:]]
    for run in named or (products, streams):
        run()
    torch.cuda.synchronize()
    print("ran every kernel")


if __name__ == "__main__":
    main()
