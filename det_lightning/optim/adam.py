"""Adam and AdamW as a fixed sequence of rounded float32 operations on torch's own optimizer state.

Everything is computed in float32; what is stored is rounded to the parameter's format, float32 or bfloat16.
Scalars are float64 (Python), rounded to float32 where they meet a tensor. With t the step, g the gradient (negated for
maximize), b1, b2 the betas, and b^t by repeated multiplication (no libm power):
    AdamW: p = RN(p RN(1 - lr weight_decay));   Adam: g = RN(g + RN(weight_decay p)), each if weight_decay
    m = RN(RN(b1 m) + RN((1 - b1) g));   v = RN(RN(b2 v) + RN((1 - b2) RN(g g)));   amsgrad: v' = max(v', v)
    d = RN(RN(sqrt(v) / sqrt(1 - b2^t)) + eps)   with v' instead of v under amsgrad
    p = RN(p - RN(RN(lr / (1 - b1^t)) RN(m / d)))
"""

import math

import torch

from det_lightning.optim.scaling import divided, scaled, square_root, store


@torch.no_grad()
def adam_step(optimizer: torch.optim.Adam) -> None:
    """One step of every parameter that has a gradient, in place; AdamW where weight decay is decoupled."""
    for group in optimizer.param_groups:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = _state(optimizer, parameter, group["amsgrad"])
            state["step"] += 1
            step = int(state["step"])
            values, gradient = parameter.float(), parameter.grad.float()
            gradient = -gradient if group["maximize"] else gradient
            if decay and group["decoupled_weight_decay"]:
                values = scaled(values, 1.0 - rate * decay)
            elif decay:
                gradient = gradient + scaled(values, decay)
            first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
            first = scaled(first, beta1) + scaled(gradient, 1.0 - beta1)
            second = scaled(second, beta2) + scaled(gradient * gradient, 1.0 - beta2)
            store(state["exp_avg"], first)
            store(state["exp_avg_sq"], second)
            if group["amsgrad"]:
                second = torch.maximum(state["max_exp_avg_sq"].float(), second)
                store(state["max_exp_avg_sq"], second)
            divisor = divided(square_root(second), math.sqrt(1.0 - power(beta2, step)))
            divisor = divisor + torch.tensor(float(group["eps"]), dtype=torch.float32)
            store(parameter, values - scaled(first / divisor, rate / (1.0 - power(beta1, step))))


def power(base: float, exponent: int) -> float:
    """base^exponent in float64 by squaring from the lowest bit: the same IEEE multiplications everywhere."""
    result, square = 1.0, base
    while exponent:
        if exponent & 1:
            result = result * square
        square = square * square
        exponent >>= 1
    return result


def _state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, amsgrad: bool) -> dict:
    """torch's own state of a parameter, made as torch makes it."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
        if amsgrad:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter)
    return state
