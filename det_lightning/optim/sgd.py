"""SGD as a fixed sequence of rounded float32 operations on torch.optim.SGD's own state.

Everything is computed in float32; what is stored is rounded to the parameter's format, float32 or bfloat16.
With g the gradient (negated for maximize), every constant rounded to float32 first:
    g = RN(g + RN(weight_decay p))                       if weight_decay
    b = g at the first use, else RN(RN(momentum b) + RN((1 - dampening) g));   g = RN(g + RN(momentum b)) if nesterov, else b
    p = RN(p - RN(lr g))
Each line is a multiplication and then an addition: never a fused multiply-add, as torch's alpha= is on some machines.
"""

import torch

from det_lightning.ops.canonical import canonical_nan
from det_lightning.optim.scaling import scaled, store


@torch.no_grad()
def sgd_step(optimizer: torch.optim.SGD) -> None:
    """One step of every parameter that has a gradient, in place."""
    for group in optimizer.param_groups:
        rate, momentum = float(group["lr"]), float(group["momentum"])
        keep = 1.0 - float(group["dampening"])
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            values, update = parameter.float(), parameter.grad.float()
            update = -update if group["maximize"] else update
            if group["weight_decay"]:
                update = update + scaled(values, float(group["weight_decay"]))
            if momentum:
                state = optimizer.state[parameter]
                buffer = state.get("momentum_buffer")
                if buffer is None:
                    buffer = update.clone()
                else:
                    buffer = scaled(buffer.float(), momentum) + (scaled(update, keep) if keep != 1.0 else update)
                buffer = canonical_nan(buffer)
                state["momentum_buffer"] = buffer.to(parameter.dtype)
                update = update + scaled(buffer, momentum) if group["nesterov"] else buffer
            store(parameter, values - scaled(update, rate))
