"""Checks a training under strategy="det" for silent data corruption while it runs. Everything compared is exact, so there is
no tolerance and no false alarm: products are computed once more by the slow definition, and the state after a step has to
be the state before the next.
"""

import random
from collections.abc import Callable
from typing import Any, Literal

import torch
from det_lightning.callbacks.lightning_namespace import Callback
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.started_digests import digests_of

from det_lightning.errors import DetError, FaultError, InputError
from det_lightning.kernels import dispatch
from det_lightning.kernels.dispatch import kernels_of

_PRODUCTS = ("gemm.gemm", "gemm.add_gemm_digits")
_SLOW = "long_accumulator"


class FaultGuard(Callback):
    """Looks for results that are not what the contract says, and for memory that changes by itself.

    Args:
        products_every_n_steps: at every so many steps, rows of each matrix product of the forward and the backward pass
            are computed again; None for never.
        rows: how many rows of each product, chosen anew each time; None for all.
        state: compare weights, optimizer state and buffers before each step with what they were after the last one.

    Attributes:
        products_checked, states_checked: how many, on this rank.

    Raises:
        FaultError: with rank, step, layer and kind. A wrong product is computed twice more before it is called
            "transient" (right the second time) or "persistent".
        InputError: an interval or a number of rows below 1.
    """

    def __init__(self, *, products_every_n_steps: int | None = 10, rows: int | None = 1, state: bool = True):
        super().__init__()
        for name, number in (("products_every_n_steps", products_every_n_steps), ("rows", rows)):
            if number is not None and (type(number) is not int or number < 1):
                raise InputError(f"{name} is {number!r}; give a whole number from 1, or None")
        self._every, self._rows, self._state = products_every_n_steps, rows, state
        self.products_checked = self.states_checked = 0
        self._after: dict[str, bytes] | None = None
        self._choose = random.Random(0)  # of its own: the training draws nothing from it
        self._names: dict[int, str] = {}
        self._rank = self._step = 0

    def on_train_start(self, trainer, pl_module) -> None:
        self._rank, self._after = trainer.global_rank, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._step = trainer.global_step + 1
        if self._after is not None:
            self._compare_state(trainer, pl_module)
        if self._every is not None and self._step % self._every == 0 and dispatch.observer is None:
            self._names = {parameter.data_ptr(): name for name, parameter in pl_module.named_parameters()}
            dispatch.observer = self._observe

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._stop()
        if self._state:
            self._after = self._digests(trainer, pl_module)

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._stop()

    def teardown(self, trainer, pl_module, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if dispatch.observer == self._observe:
            dispatch.observer = None

    def _digests(self, trainer, pl_module) -> dict[str, bytes]:
        states = named_states(pl_module, trainer.optimizers)
        return {
            f"{kind} {name}": digest
            for kind in ("weights", "optimizer", "buffers")
            for name, digest in digests_of(states[kind]).items()
        }

    def _compare_state(self, trainer, pl_module) -> None:
        now, self.states_checked = self._digests(trainer, pl_module), self.states_checked + 1
        changed = sorted(name for name in now.keys() & self._after.keys() if now[name] != self._after[name])
        self._after = None
        if changed:
            raise self._fault(
                changed[0],
                "memory",
                None,
                f"{', '.join(changed[:5])} changed between step {self._step - 1} and step {self._step}, where nothing may "
                f"change it: memory, or code outside the training step (a callback behind the guard)",
            )

    def _observe(self, name: str, kernel: Callable, arguments: tuple, options: dict) -> Any:
        if name not in _PRODUCTS:
            return kernel(*arguments, **options)
        dispatch.observer = None  # what the check computes is not checked
        try:
            check = self._check_digits if name == _PRODUCTS[1] else self._check_product
            return check(kernel, arguments, options)
        finally:
            dispatch.observer = self._observe

    def _check_product(self, kernel: Callable, arguments: tuple, options: dict) -> torch.Tensor:
        x, w, bias, form = arguments[:4]
        result = kernel(*arguments, **options)
        rows = self._chosen(x.shape[0])
        expected = kernel(x[rows], w, bias, form, _SLOW)
        if not _same(result[rows], expected):
            again = kernel(*arguments, **options)
            self._report(w, "product", persistent=not _same(again[rows], expected))
        return result

    def _check_digits(self, kernel: Callable, arguments: tuple, options: dict) -> None:
        digits, x, w, engine = arguments[:4]
        rows = self._chosen(x.shape[0])
        before = digits[rows].clone()
        result = kernel(*arguments, **options)
        expected = before.clone()
        kernel(expected, x[rows], w, _SLOW)
        if not _same(_canonical(digits[rows]), _canonical(expected)):
            again = before.clone()
            kernel(again, x[rows], w, engine)
            self._report(w, "gradient digits", persistent=not _same(_canonical(again), _canonical(expected)))
        return result

    def _chosen(self, count: int) -> torch.Tensor:
        self.products_checked += 1
        if self._rows is None or self._rows >= count:
            return torch.arange(count)
        return torch.tensor(sorted(self._choose.sample(range(count), self._rows)))

    def _report(self, operand: torch.Tensor, kind: str, *, persistent: bool) -> None:
        layer = self._names.get(operand.data_ptr(), f"a layer with an operand {list(operand.shape)}")
        verdict = "persistent" if persistent else "transient"
        raise self._fault(
            layer,
            kind,
            verdict,
            f"a {kind} of {layer} is not the exact one; computed again it is "
            + ("wrong too: the processor or the kernel" if persistent else "right: a fault of the moment"),
        )

    def _fault(self, layer: str, kind: str, verdict: Literal["transient", "persistent"] | None, what: str) -> DetError:
        return FaultError(
            f"silent data corruption on rank {self._rank} in step {self._step}: {what}. Go back to a checkpoint before this "
            f"step, on another machine if it comes again",
            rank=self._rank,
            step=self._step,
            layer=layer,
            kind=kind,
            verdict=verdict,
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits; results of covered kernels hold canonical NaNs only."""
    return torch.equal(_words(one), _words(other))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _canonical(digits: torch.Tensor) -> torch.Tensor:
    return kernels_of("reduction").normalise(digits.clone(memory_format=torch.contiguous_format))
