"""Clipping and stepping under the contract, for both of Lightning's namespaces."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from det_lightning.distributed.random_guard import no_draws_of_step
from det_lightning.errors import UncoveredError
from det_lightning.layers.function_mode import all_suspended
from det_lightning.optim.gradient_norm import clip_gradients_by_norm, clip_gradients_by_value
from det_lightning.optim.one_thread import one_thread
from det_lightning.optim.stepping import step_optimizer


class DetPrecisionMixin:
    """Mixed in before Lightning's Precision plugins.

    Attributes:
        clip: (norm before, coefficient) of the last step, float32 without dimensions; None if it was not clipped.
    """

    clip: tuple[Tensor, Tensor] | None = None
    _clipped: tuple[Tensor, Tensor] | None = None  # since the last step; by hand one clips before one steps

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward, backward, hooks and clipping as Lightning does them, then our sequence instead of `.step()`."""
        if kwargs:
            raise UncoveredError(
                f'optimizer.step() was called with {", ".join(sorted(kwargs))}; strategy="det" steps without arguments'
            )
        if model.automatic_optimization:
            self._clipped = None
        result = self._wrap_closure(model, optimizer, closure)
        self.clip, self._clipped = self._clipped, None
        # In manual optimization this is within the user's step.
        with no_draws_of_step(f"while {type(optimizer).__name__} stepped"), all_suspended():
            step_optimizer(optimizer)
        return result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Hooks that change gradients; what they add up is to have the same bits whatever the number of threads."""
        with no_draws_of_step("in on_before_optimizer_step or configure_gradient_clipping"), one_thread():
            super()._after_closure(model, optimizer)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        with all_suspended():
            self._clipped = clip_gradients_by_norm(self._gradients(optimizer), float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        with all_suspended():
            clip_gradients_by_value(self._gradients(optimizer), float(clip_val))

    def _gradients(self, optimizer: Any) -> list[Tensor]:
        return [parameter.grad for parameter in self.main_params(optimizer) if parameter.grad is not None]


class PrecisionProperty:
    """The strategy's `precision_plugin`: Lightning's plugins for 32-true, bf16-true and bf16-mixed become ours, any other
    is refused.

    Attributes:
        twins: (Lightning's plugin class of this namespace, precision) -> the subclass of it with DetPrecisionMixin.
    """

    twins: dict[tuple[type, str], type]

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin or self._plain()()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        # None stays None: with a plugin set here, Lightning would not look at Trainer(precision=...).
        if plugin is not None and not isinstance(plugin, DetPrecisionMixin):
            precision = getattr(plugin, "precision", "?")
            twin = self.twins.get((type(plugin), precision))
            if twin is None:
                reason = (
                    "its loss scaling leaves steps out, by a rule that looks at overflows; bfloat16 needs none"
                    if precision == "16-mixed"
                    else "its formats have no contract"
                )
                raise UncoveredError(
                    f"precision plugin {type(plugin).__name__} (precision={precision}) is not covered by "
                    f'strategy="det": {reason}. Pass Trainer(precision="32-true"), "bf16-true" or "bf16-mixed".'
                )
            plugin.__class__ = twin
        self._precision_plugin = plugin

    def _plain(self) -> type:
        return next(twin for (_, precision), twin in self.twins.items() if precision == "32-true")
