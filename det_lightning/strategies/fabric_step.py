"""One optimizer step of `Fabric(strategy="det")`: the micro-batches that the loader yields, the backward passes that leave
digits in the reducer, the gradients after the last one, and our optimizer sequence.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_lightning.distributed.random_guard import no_draws_of_step, refuse_draws, states
from det_lightning.distributed.reducer import GradientReducer
from det_lightning.distributed.replicas import check_replicas
from det_lightning.distributed.slice_loader import SliceLoader
from det_lightning.errors import InputError, UncoveredError
from det_lightning.layers.function_mode import FunctionMode
from det_lightning.layers.random_places import RandomPlaces
from det_lightning.optim.gradient_norm import clip_gradients_by_norm, clip_gradients_by_value
from det_lightning.optim.stepping import step_optimizer
from det_lightning.strategies.backward_passes import add_loss, backward_passes, check_trainable, reducer_of_step
from det_lightning.strategies.covered_tensor import CoveredTensor, Scope
from det_lightning.strategies.state_watch import StateWatch
from det_lightning.strategies.step import StepFacts


class FabricStepMixin:
    """The part of the strategy that runs steps.

    Attributes:
        step_facts: of the last optimizer step, its loss over the global batch among them.
        steps_done: steps whose gradients were brought; the place in the order of samples follows from it.
    """

    step_facts: StepFacts | None = None
    steps_done = 0

    _module: nn.Module | None = None
    _reducer: GradientReducer | None = None
    _scope: Scope | None = None
    _watch: StateWatch
    _optimizers: list[Optimizer]
    _generators: dict[str, object] | None = None  # when the batch was loaded
    _pending = 0  # micro-batches of a step that is not finished
    _skipping = False  # within no_backward_sync

    def begin_pass(self, loader: SliceLoader) -> None:
        if self._module is None:
            raise InputError("a training loader was iterated before fabric.setup(model, optimizer).")
        if self._scope is not None:
            self._scope.end()
        if self._reducer is not None:
            self._reducer.clear()
        self._pending = 0

    def begin_batch(self) -> Scope:
        data = self.training_data
        if self._pending == 0:
            self._begin_step()
        else:
            check_trainable(self._module, self._reducer)
        self._reducer.weightless = data.current.empty
        self._watch.begin(self._module, self._optimizers, number=self._pending, of=self._accumulate)
        places = RandomPlaces(data.order.seed, self.steps_done, data.positions, "step")
        mode = FunctionMode(self._module, sink=self._reducer, samples=data.samples, strict=True, places=places)
        mode.reads = self._watch.reads
        self._scope, self._generators = Scope(mode), states()
        return self._scope

    def _begin_step(self) -> None:
        named = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
        self._reducer = reducer_of_step(self._reducer, named)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Leaves the digits of a loss in the reducer; after the step's last micro-batch, brings the gradients."""
        scope = self._scope
        if not isinstance(tensor, CoveredTensor) or scope is None or tensor.scope is not scope or scope.mode is None:
            raise UncoveredError(
                "fabric.backward was called on a tensor that was not computed from the batch at hand. A loss is made of "
                "the batch that the training loader yielded, with gradients on and the model in training mode, and put "
                "through fabric.backward once: add losses of one batch, and call it within the loop over the loader."
            )
        refuse_draws(self._generators, "between a batch and fabric.backward")
        last = self._pending + 1 == self._accumulate
        if last and self._skipping:
            raise InputError(
                f"micro-batch {self._accumulate} of {self._accumulate} ran under fabric.no_backward_sync(enabled=True), but "
                f"the step ends with it. Fabric's strategy was made with accumulate={self._accumulate}: give it the number "
                f"of micro-batches that the loop takes, FabricDetStrategy(accumulate=...)."
            )
        parameters = list(self._module.named_parameters())
        if self._pending == 0:
            _clear_gradients(parameters)
        plan = scope.mode.terms.finish(tensor.inner)
        self._watch.end(self._module, self._optimizers)
        add_loss(plan, self._reducer)
        precision = self.precision

        def back(loss: Tensor, again: dict[str, Any]) -> None:
            precision.backward(loss, self._module, *args, **{**kwargs, **again})

        precision.pre_backward(tensor.inner, self._module)
        backward_passes(plan, self._reducer, parameters, back, last=last)
        self._pending += 1
        scope.end()
        if last:
            means, _ = self._reducer.reduce()
            penalties = plan.partial(None)
            if penalties is not None:  # once a step, the same on every rank
                back(penalties, {})
            self.step_facts = StepFacts(plan.evaluate(means).cpu(), self.training_data.current, None)
            self.steps_done, self._pending = self.steps_done + 1, 0
        precision.post_backward(tensor.inner, self._module)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        """Gradients are exchanged after a step's last micro-batch in any case; looks whether the loop agrees on which."""
        return self._without_sync() if enabled else nullcontext()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        if kwargs:
            raise UncoveredError(
                f'optimizer.step() was called with {", ".join(sorted(kwargs))}; strategy="det" steps without arguments: '
                f"call fabric.backward(loss) and then optimizer.step()"
            )
        if self._pending:
            raise InputError(
                f"optimizer.step() after {self._pending} of {self._accumulate} micro-batches of a step, whose gradients are "
                f"not complete. Step after every {self._accumulate}, or make the strategy with the number that the loop "
                f"takes, FabricDetStrategy(accumulate=...)."
            )
        with no_draws_of_step(f"while {type(optimizer).__name__} stepped"):
            step_optimizer(optimizer)
        if self._check_replicas and self._module is not None:
            named = [*self._module.named_parameters(), *self._module.named_buffers()]
            check_replicas(named, f"after optimizer step {self.steps_done}")

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """The norm of the optimizer's gradients before they were clipped: the root of one exact sum of squares."""
        if float(norm_type) != 2.0:
            raise UncoveredError(f"clipping by the norm of type {norm_type} has no contract; covered: norm_type=2")
        norm, _ = clip_gradients_by_norm(self._gradients(optimizer), float(max_norm))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the total norm of the gradients is {norm.item()}; to clip all the same, pass error_if_nonfinite=False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        clip_gradients_by_value(self._gradients(optimizer), float(clip_val))

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return [p.grad for p in self.precision.main_params(optimizer) if p.grad is not None]


def _clear_gradients(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Raises InputError if gradients of the step before are still there: stock strategies would add to them."""
    for name, parameter in parameters:
        if parameter.grad is not None and bool(parameter.grad.any()):
            raise InputError(
                f"the parameter {name} still has the gradient of the step before. Call optimizer.zero_grad() after each "
                f"step; to add up micro-batches, make the strategy with FabricDetStrategy(accumulate=...)."
            )
        parameter.grad = None
