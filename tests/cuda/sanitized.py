"""The smallest cases of every kernel, for `compute-sanitizer --tool memcheck|racecheck python tests/cuda/sanitized.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32, NB
from det_lightning.kernels import cuda_digest, cuda_elementary, cuda_gemm, cuda_reduction


def main() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(70, 200, device="cuda"), torch.randn(130, 200, device="cuda")
    bias = torch.randn(130, device="cuda")
    digits = torch.zeros((70, 130, NB), dtype=torch.int64, device="cuda")
    for moduli in (6, 14):
        cuda_gemm.gemm(x, w, None, FLOAT32, "int8", moduli=moduli)
        cuda_gemm.gemm(x.bfloat16(), w, bias, BFLOAT16, "int8", moduli=moduli)
        cuda_gemm.add_gemm_digits(digits, x, w, "int8", moduli=moduli)
    cuda_gemm.gemm(x[:, 1:], w[:, 1:], None, FLOAT32, "int8", moduli=6, workspace_bytes=1)
    cuda_gemm.gemm(
        torch.randn(3, 2000, device="cuda"), torch.randn(2, 2000, device="cuda"), None, FLOAT32, "int8", moduli=5
    )
    columns, cuda_gemm._tile_columns = cuda_gemm._tile_columns, lambda *_: 256
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", moduli=6)
    cuda_gemm._tile_columns = columns
    capability, cuda_gemm.capability = cuda_gemm.capability, lambda index: (8, 0)
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", moduli=6)
    cuda_gemm.capability = capability
    cuda_gemm.gemm(x[:9], w[:5], bias[:5], FLOAT32, "long_accumulator")
    cuda_gemm.add_gemm_digits(
        torch.zeros((9, 5, NB), dtype=torch.int64, device="cuda"), x[:9], w[:5], "long_accumulator"
    )
    states = cuda_reduction.sum_states(x.view(1, -1, 1))
    cuda_reduction.sum_states(x.view(1, 70, 200)), cuda_reduction.sum_states(x[:, 1:].reshape(70, 199, 1))
    cuda_reduction.row_states("products", x, x), cuda_reduction.sum_of_squares_state(x)
    cuda_reduction.finalize(states, FLOAT32, 3)
    for name in ("exp", "log"):
        cuda_elementary.elementwise(name, x), cuda_elementary.elementwise(name, x[:, 1:], only_pairs=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        cuda_digest.tensor_lanes(x.to(dtype))
    torch.cuda.synchronize()
    print("ran every kernel")


if __name__ == "__main__":
    main()
