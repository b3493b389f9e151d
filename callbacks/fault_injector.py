"""Flips a chosen bit at a chosen place of a training: a drill for `bisect` and for guards against corruption."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from det_lightning.callbacks.kernel_watch import unwatch, watch
from det_lightning.callbacks.lightning_namespace import Callback
from det_lightning.callbacks.run_states import named_states

from det_lightning.distributed import transfer
from det_lightning.errors import InputError

KINDS = ("weight", "optimizer", "gradient", "product", "gradient digits", "digits in flight")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FaultInjector(Callback):
    """Flips one bit of one element; of a weight, place it before the WeightLedger that is to notice.

    Args:
        step: from 1. A weight or optimizer state is flipped after this optimizer step, everything else within it.
        parameter: name of a parameter; what is flipped belongs to it.
        index: flat index of the element in row-major order: of the parameter, of the state, of its gradient, of the result
            of a product with it, of the digits of its gradient, or of the words that a rank receives for it and for what
            travels with it.
        bit: 0 (lowest) to the width of the element less one (31 for float32).
        rank: the only rank on which it is flipped; None for all.
        kind: "weight"; "optimizer" (see `state`); "gradient", reduced; "product", the result of the first one in the step
            that has the parameter as a factor; "gradient digits", after they were added to; "digits in flight", as they
            arrive.
        state: which state of the optimizer, such as "exp_avg" or "momentum_buffer"; by default its first one of the
            parameter's shape.
        lasting: products and transfers are flipped each time they are made in this step, as by a broken part, and not once.

    Attributes:
        flips: (name, value before, value after) of each, on this rank.

    Raises:
        InputError: at the start of training, or where the fault should happen, if there is no such place.
    """

    def __init__(
        self,
        step: int,
        parameter: str,
        index: int,
        bit: int,
        *,
        rank: int | None = None,
        kind: Literal["weight", "optimizer", "gradient", "product", "gradient digits", "digits in flight"] = "weight",
        state: str | None = None,
        lasting: bool = False,
    ):
        super().__init__()
        if kind not in KINDS:
            raise InputError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
        self.step, self.parameter, self.index, self.bit, self.rank = step, parameter, index, bit, rank
        self.kind, self.state, self.lasting = kind, state, lasting
        self.flips: list[tuple[str, Any, Any]] = []
        self._done = self._active = False
        self._target: torch.Tensor | None = None
        self._strategy: Any = None

    def on_train_start(self, trainer, pl_module) -> None:
        parameters = dict(pl_module.named_parameters())
        self._target, self._strategy = parameters.get(self.parameter), getattr(trainer, "strategy", None)
        if self._target is None:
            raise InputError(f"there is no parameter {self.parameter!r}; the model has {', '.join(parameters)}")
        if self.kind in ("weight", "gradient"):
            self._check(self._target, self.parameter)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._is_now(trainer, trainer.global_step + 1):
            self._active = True
            if self.kind in ("product", "gradient digits"):
                watch(self._kernel, innermost=True)
            elif self.kind == "digits in flight":
                transfer.watchers.insert(0, self._transfer)

    def on_after_backward(self, trainer, pl_module) -> None:
        if self._active and self.kind == "gradient" and self._target.grad is not None and not self._done:
            self._flip(self._target.grad, f"gradient of {self.parameter}")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._stop()
        if not self._is_now(trainer, trainer.global_step) or self._done:
            return
        if self.kind == "weight":
            self._flip(dict(pl_module.named_parameters())[self.parameter], self.parameter)
        elif self.kind == "optimizer":
            self._flip(*self._state_tensor(trainer, pl_module))

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._stop()

    def teardown(self, trainer, pl_module, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._active = False
        unwatch(self._kernel)
        if self._transfer in transfer.watchers:
            transfer.watchers.remove(self._transfer)

    def _is_now(self, trainer: Any, step: int) -> bool:
        return step == self.step and self.rank in (None, getattr(trainer, "global_rank", 0))

    def _state_tensor(self, trainer: Any, pl_module: torch.nn.Module) -> tuple[torch.Tensor, str]:
        states = named_states(pl_module, trainer.optimizers)["optimizer"]
        own = {
            name.rpartition(".")[2]: each for name, each in states.items() if name.rpartition(".")[0] == self.parameter
        }
        name = self.state or next((name for name, each in own.items() if each.shape == self._target.shape), "")
        if name not in own:
            raise InputError(
                f"the optimizer has no state {name!r} of {self.parameter}; it has {', '.join(own) or 'none'}"
            )
        return own[name], f"{name} of {self.parameter}"

    def _kernel(self, name: str, kernel: Callable, arguments: tuple, options: dict) -> Any:
        result = kernel(*arguments, **options)
        if self._active and (self.lasting or not self._done):
            if self.kind == "product" and name == "gemm.gemm" and arguments[1].data_ptr() == self._target.data_ptr():
                self._flip(result, f"product with {self.parameter}")
            elif self.kind == "gradient digits" and name == "gemm.add_gemm_digits" and self._collects_target():
                self._flip(arguments[0], f"gradient digits of {self.parameter}")
            elif self.kind == "gradient digits" and name == "gemm_windowed.add" and self._collects_target():
                self._flip(arguments[2], f"gradient digits of {self.parameter}")
        return result

    def _collects_target(self) -> bool:
        """Whether the digits that the backward pass adds to are those of the parameter."""
        collecting = getattr(getattr(self._strategy, "_reducer", None), "collecting", None)
        return collecting is not None and collecting[1] is self._target

    def _transfer(self, label: str, received: torch.Tensor, sent: torch.Tensor, group: Any, work: Any) -> Any:
        due = self._active and self.parameter in label.split(", ") and (self.lasting or not self._done)
        return _Flipped(work, lambda: self._flip(received, f"digits of {label} in flight")) if due else work

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        width = 8 * tensor.element_size()
        if tensor.element_size() not in _INTEGERS or not 0 <= self.index < tensor.numel() or not 0 <= self.bit < width:
            raise InputError(
                f"{name} is {tensor.dtype} with {tensor.numel()} elements: there is no bit {self.bit} of "
                f"element {self.index} to flip"
            )

    def _flip(self, tensor: torch.Tensor, name: str) -> None:
        self._check(tensor, name)
        self._done = True
        integer = _INTEGERS[tensor.element_size()]
        mask = (1 << self.bit) - (1 << 8 * tensor.element_size() if self.bit == 8 * tensor.element_size() - 1 else 0)
        with torch.no_grad():
            place = torch.unravel_index(torch.tensor(self.index), tensor.shape)
            before = tensor.detach()[place].clone()
            after = (before.view(integer) ^ mask).view(tensor.dtype)
            tensor.detach()[place] = after
        self.flips.append((name, before.item(), after.item()))


class _Flipped:
    """A work after which a bit is flipped."""

    def __init__(self, work: Any, flip: Callable[[], None]):
        self._work, self._flip = work, flip

    def wait(self) -> None:
        self._work.wait()
        self._flip()
