"""One optimizer step of `strategy="det"`: forward under the function mode, backward into the reducer, exact gradients.

With automatic optimization every micro-batch leaves its digits in the reducer and the last one brings the gradients. By
hand (automatic_optimization = False) every manual_backward is a reduction of its own, over the samples of all ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from det_lightning.distributed.random_guard import no_draws
from det_lightning.distributed.reducer import GradientReducer
from det_lightning.distributed.replicas import check_replicas
from det_lightning.distributed.sample_order import Slice
from det_lightning.errors import UncoveredError
from det_lightning.layers.checkpointing import covered_checkpointing
from det_lightning.layers.function_mode import FunctionMode, all_suspended
from det_lightning.layers.loss_plan import LossPlan
from det_lightning.layers.random_places import RandomPlaces
from det_lightning.ops.canonical import canonical_nan
from det_lightning.optim.gradient_norm import gradient_norm
from det_lightning.strategies.backward_passes import add_loss, backward_passes, check_trainable, reducer_of_step
from det_lightning.strategies.exact_results import ExactCollection
from det_lightning.strategies.stand_in import surroundings
from det_lightning.strategies.state_watch import StateWatch


@dataclass(frozen=True)
class StepFacts:
    """What the last optimizer step was made of; the same on every rank.

    Attributes:
        loss: float32 without dimensions, the exact mean over the global batch put through the loss's constants.
        slice: epoch and step within the epoch.
        sample_digest: sum modulo 2^64 of the digests of all samples; None unless `record_samples` is set.
    """

    loss: Tensor
    slice: Slice
    sample_digest: int | None


class StepMixin:
    """The part of the strategy that runs steps.

    Attributes:
        step_facts: of the last optimizer step.
    """

    step_facts: StepFacts | None = None

    def _clear_step(self) -> None:
        self._reducer: GradientReducer | None = None
        self._plan: LossPlan | None = None
        self._running: FunctionMode | None = None  # while training_step runs
        self._watch = StateWatch()
        self._digest: int | None = None  # of the micro-batch's samples, until it has been added
        self._synchronise = True
        self._untrained = False  # a batch was handed out and training_step did not come
        self._pending = 0  # micro-batches of a step that is not finished

    def _mode(self, *, sink: GradientReducer | None, phase: str) -> FunctionMode:
        data = self.training_data
        step = self.lightning_module.trainer.global_step
        places = RandomPlaces(data.order.seed, step, data.positions, phase)
        return FunctionMode(self.lightning_module, sink=sink, samples=data.samples, strict=True, places=places)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        here, self._untrained = self.training_data.current, False
        if self._pending == 0:
            self._begin_step()
            results = self.lightning_module.trainer.fit_loop.epoch_loop._results
            if isinstance(results, ExactCollection) and self.lightning_module.trainer.accumulate_grad_batches > 1:
                results.mark()  # for a checkpoint within the step
            if self._resumed is not None:
                # Lightning skips schedulers that look at an epoch's metrics in the epoch of a resume, because it has
                # not got those of its first part; ours are in the checkpoint.
                self.lightning_module.trainer.fit_loop._restarting = False
        else:
            check_trainable(self.lightning_module, self._reducer)
        self._reducer.weightless = here.empty
        self._watch.begin(
            self.lightning_module,
            self.optimizers,
            number=self._pending,
            of=self.lightning_module.trainer.accumulate_grad_batches,
        )
        self._running = mode = self._mode(sink=self._reducer, phase="step")
        self._digest = self.training_data.current_digest
        try:
            with (
                no_draws("in training_step"),
                covered_checkpointing(mode.again),
                surroundings(self.lightning_module, mode, weightless=here.empty, window=(here.epoch, here.step)),
            ):
                output = super().training_step(*args, **kwargs)
        finally:
            self._running = None
        if not self.lightning_module.automatic_optimization:
            return output
        self._watch.end(self.lightning_module, self.optimizers)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise UncoveredError(
                f'training_step returned {type(output).__name__} without a loss tensor. Under strategy="det" every '
                f"micro-batch takes part in the exact sum: return the loss, or leave the sample out of the data set."
            )
        self._take(mode.terms.finish(loss))
        self._pending += 1
        return output

    def _take(self, plan: LossPlan) -> None:
        """Adds the values of a loss to those of the step."""
        self._plan = plan
        add_loss(plan, self._reducer)
        if self._digest is not None:
            self._reducer.add_sample_digest(self._digest)
            self._digest = None

    def _begin_step(self) -> None:
        """Buckets of the parameters that are trainable now: callbacks may freeze and unfreeze between two steps."""
        module = self.lightning_module
        automatic = module.automatic_optimization
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad or not automatic]
        # By hand one freezes parameters within a step, and runs several graphs forward before one backward.
        self._reducer = reducer_of_step(self._reducer, named, announced=automatic, frozen_too=not automatic)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Back-propagates the loss as training_step returned it: Lightning's own was divided by the accumulation."""
        module = self.lightning_module
        if not module.automatic_optimization:
            return self._backward_by_hand(closure_loss, *args, **kwargs)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter in module.parameters():
            parameter.grad = None
        self._collect(optimizer, args, kwargs, last=self._synchronise)
        if self._synchronise:
            self._reduce(optimizer)
        self._plan = None
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _backward_by_hand(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """manual_backward: the exact gradient of this loss over the samples of all ranks, added to what `.grad` holds."""
        module, mode = self.lightning_module, self._running
        if mode is None:
            raise UncoveredError("manual_backward was called outside training_step, where no samples are at hand.")
        others = sorted({*kwargs} - {"retain_graph"}) + ["another argument"] * len(args)
        if others and any(value is not None and value is not False for value in (*args, *map(kwargs.get, others))):
            raise UncoveredError(
                f"manual_backward was called with {', '.join(others)}: covered is retain_graph. Gradients exist as exact "
                f"sums after the reduction only, so that no graph of them can be made (create_graph), and each parameter "
                f"that the loss reaches receives one; multiply the loss by a number instead of passing gradient."
            )
        with mode.suspended():
            self.pre_backward(loss)
            loss = self.precision_plugin.pre_backward(loss, module)
            held = [(parameter, parameter.grad) for parameter in module.parameters()]
            for parameter, _ in held:
                parameter.grad = None
            self._take(mode.terms.finish(loss))
            self._collect(None, args, kwargs, last=True)
            self._reduce(None)
            self._plan = None
            for parameter, before in held:
                if before is not None:
                    added = parameter.grad
                    parameter.grad = before if added is None else canonical_nan(before + added)
            loss = self.precision_plugin.post_backward(loss, module)
            self.post_backward(loss)
        return loss

    def _collect(self, optimizer: Any, args: tuple, kwargs: dict[str, Any], *, last: bool) -> None:
        """The backward passes of one loss, which leave their digits in the reducer."""
        module = self.lightning_module

        def backward(loss: Tensor, again: dict[str, Any]) -> None:
            try:
                self.precision_plugin.backward(loss, module, optimizer, *args, **{**kwargs, **again})
            except TypeError as error:
                if "retain_graph" not in str(error) or not again:
                    raise
                raise UncoveredError(
                    "the means of this loss divide by unlike numbers, so it takes several backward passes, and "
                    f"{type(module).__name__}.backward does not take retain_graph. Write backward(self, loss, *args, "
                    "**kwargs): loss.backward(*args, **kwargs)."
                ) from error

        backward_passes(self._plan, self._reducer, module.named_parameters(), backward, last=last)

    def _reduce(self, optimizer: Any) -> None:
        means, digest = self._reducer.reduce()
        penalties = self._plan.partial(None)
        if penalties is not None:  # once a step, the same on every rank
            self.precision_plugin.backward(penalties, self.lightning_module, optimizer)
        self.step_facts = StepFacts(
            loss=self._plan.evaluate(means).cpu(),
            slice=self.training_data.current,
            sample_digest=digest if self.record_samples else None,
        )
        self._pending = 0

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, then a look at whether all ranks hold the same weights."""
        output = super().optimizer_step(optimizer, *args, **kwargs)
        if self._check_replicas:
            module = self.lightning_module
            with all_suspended():
                named = [*module.named_parameters(), *module.named_buffers()]
                check_replicas(named, f"after optimizer step {module.trainer.global_step + 1}")
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients as they are now: one exact sum of squares and a root, rounded once, float32; the
        same bits at every split and on every machine. For logging in on_before_optimizer_step."""
        return gradient_norm(p.grad for p in self.lightning_module.parameters() if p.grad is not None)
