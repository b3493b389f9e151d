"""Activation checkpointing: what is computed again in the backward pass runs under the contract too, with the same random
numbers, so that it moves no bit. Of torch's two kinds the reentrant one adds gradients in another order and is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as stock

from det_lightning.errors import UncoveredError
from det_lightning.layers.code_in_sight import code_in_sight

_REENTRANT = (
    'strategy="det" covers activation checkpointing of the non-reentrant kind only; the reentrant one adds gradients in '
    "another order. Write checkpoint(function, *inputs, use_reentrant=False), or for a Hugging Face model "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}).'
)
_HOOKS = 'strategy="det" does not cover hooks on saved tensors other than activation checkpointing; remove them.'
_DEBUG = (
    'strategy="det" does not cover the debug mode of activation checkpointing, which takes the place of its own contexts: '
    "remove debug=True or set_checkpoint_debug_enabled, or look into it with another strategy."
)
_switches = torch._C._autograd


class _Refused:
    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> Any:
        raise UncoveredError(_REENTRANT)


@contextmanager
def covered_checkpointing(again: Callable[[], Callable[[], "Recomputation"]]) -> Iterator[None]:
    """Within, torch's checkpoint() computes again under the contract, and other hooks on saved tensors are refused.

    Args:
        again: called where a checkpointed region begins; what it returns is called for a mode under which the region is
            computed again, and whose own `again` is for regions within it.
    """
    before = _switches._saved_tensors_hooks_get_disabled_error_message()
    _switches._saved_tensors_hooks_disable(_HOOKS)
    try:
        with _covered_regions(again):
            yield
    finally:
        if before is None:
            _switches._saved_tensors_hooks_enable()
        else:
            _switches._saved_tensors_hooks_disable(before)


class Recomputation(AbstractContextManager, Protocol):
    """A context in which a region is computed again."""

    def again(self) -> Callable[[], "Recomputation"]: ...


@contextmanager
def _covered_regions(again: Callable[[], Callable[[], Recomputation]]) -> Iterator[None]:
    generator, function = stock._checkpoint_without_reentrant_generator, stock.CheckpointFunction

    def covered(
        fn, preserve_rng_state=True, context_fn=stock.noop_context_fn, check="default", debug=False, *rest, **kwargs
    ):
        if debug if stock._checkpoint_debug_enabled is None else stock._checkpoint_debug_enabled:
            raise UncoveredError(_DEBUG)
        recomputation = again()

        def contexts():
            forward, recompute = (
                context_fn() if context_fn is not stock.noop_context_fn else (nullcontext(), nullcontext())
            )
            return forward, _Both(recompute, recomputation)

        inner = generator(fn, preserve_rng_state, contexts, check, debug, *rest, **kwargs)

        def run():
            # Within another region they are on already, and stay.
            refused = _switches._saved_tensors_hooks_get_disabled_error_message()
            _switches._saved_tensors_hooks_enable()
            try:
                # What torch does for itself is no part of the model: torch 2.11 makes an empty tensor here.
                with torch._C.DisableTorchFunction():
                    next(inner)
                yield
                with torch._C.DisableTorchFunction():
                    next(inner, None)
            finally:
                inner.close()
                if refused is not None:
                    _switches._saved_tensors_hooks_disable(refused)

        return run()

    stock._checkpoint_without_reentrant_generator, stock.CheckpointFunction = covered, _Refused
    try:
        yield
    finally:
        stock._checkpoint_without_reentrant_generator, stock.CheckpointFunction = generator, function


class _Both:
    """The caller's context and ours as one that may be entered again: several backward passes go through a region, each
    computes it again, and regions within it too.
    """

    def __init__(self, callers: Any, recomputation: Callable[[], Recomputation]):
        self._callers, self._recomputation = callers, recomputation

    def __enter__(self) -> None:
        mode = self._recomputation()
        self._stack = ExitStack()
        self._stack.enter_context(self._callers)
        self._stack.enter_context(_covered_regions(mode.again))
        self._stack.enter_context(code_in_sight())
        self._stack.enter_context(mode)

    def __exit__(self, *error: Any) -> Any:
        return self._stack.__exit__(*error)
