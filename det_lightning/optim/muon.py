"""Muon as a fixed sequence of rounded operations on torch.optim.Muon's own state, its products exact sums.

In float32 unless written B(), which rounds to bfloat16 as the stock optimizer does; G, X are matrices with no more rows
than columns (transposed otherwise), with momentum mu, coefficients (a, b, c) and e the eps:
    m = RN(m + RN(RN(1 - mu) RN(g - m)));   u = RN(m - RN(RN(1 - mu) RN(m - g))) if nesterov, else m
    X = B(u);   X = B(X / max(RN(sqrt(exact sum of X^2)), e))
    ns_steps times:   G = B(exact X X^T);   H = B(RN(b G) + RN(c RN(exact G G)));   X = B(RN(a X) + RN(exact H X))
    p = RN(RN(p RN(1 - lr weight_decay)) - RN(RN(lr r) X)),   r = sqrt(max(1, rows / columns)) and the like, in float64
"""

import math

import torch

from det_lightning.ops.gemm import det_gemm
from det_lightning.optim.gradient_norm import gradient_norm
from det_lightning.optim.scaling import rounded, scaled, store

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@torch.no_grad()
def muon_step(optimizer: torch.optim.Optimizer) -> None:
    """One step of every matrix that has a gradient, in place."""
    for group in optimizer.param_groups:
        rate, keep = float(group["lr"]), 1.0 - float(group["momentum"])
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            gradient, momentum = parameter.grad.float(), state["momentum_buffer"].float()
            momentum = momentum + scaled(gradient - momentum, keep)
            store(state["momentum_buffer"], momentum)
            update = momentum - scaled(momentum - gradient, keep) if group["nesterov"] else momentum
            update = orthogonalised(update, group["ns_coefficients"], int(group["ns_steps"]), float(group["eps"]))
            values = scaled(parameter.float(), 1.0 - rate * float(group["weight_decay"]))
            step = rate * _rate_ratio(group["adjust_lr_fn"], *parameter.shape)
            store(parameter, values - scaled(update.float(), step))


def orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """[rows, columns] bfloat16: the Newton-Schulz iterations of the module's head on a float32 matrix."""
    a, b, c = (float(each) for each in coefficients)
    wide = matrix.shape[0] <= matrix.shape[1]
    x = rounded(matrix if wide else matrix.t(), BFLOAT16).contiguous()
    norm = torch.maximum(gradient_norm([x]), torch.tensor(eps, dtype=FLOAT32, device=x.device))
    x = rounded(x.float() / norm, BFLOAT16)
    for _ in range(steps):
        gram = det_gemm(x, x, dtype=BFLOAT16)
        # The gram matrix is its own transpose, bit by bit, so that this is gram times gram.
        polynomial = scaled(gram.float(), b) + scaled(det_gemm(gram, gram, dtype=FLOAT32), c)
        x = rounded(scaled(x.float(), a) + det_gemm(rounded(polynomial, BFLOAT16), x.t(), dtype=FLOAT32), BFLOAT16)
    return x if wide else x.t()


def _rate_ratio(adjust: str | None, rows: int, columns: int) -> float:
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
