"""Checks a training under strategy="det" for silent data corruption while it runs. Everything compared is exact, so there is
no tolerance and no false alarm.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from warnings import warn

from det_lightning.callbacks.foreign_hooks import foreign_hooks
from det_lightning.callbacks.kernel_watch import unwatch, watch
from det_lightning.callbacks.lightning_namespace import Callback
from det_lightning.callbacks.product_check import GRADIENT_DIGITS, ProductCheck, WrongProduct
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.started_digests import digests_of
from det_lightning.callbacks.transfer_check import TransferCheck

from det_lightning.distributed.replicas import drift_of
from det_lightning.errors import FaultError, InputError

_STATE = ("weights", "optimizer", "buffers")
_BOUNDARY = [
    f"on_{what}"
    for what in "train_epoch_end train_epoch_start validation_start validation_end validation_epoch_end".split()
]


class FaultGuard(Callback):
    """Looks for results that are not what the contract says, and for memory that changes by itself.

    At some steps: the digits of every gradient's product are verified modulo a prime, rows of every other product are
    computed again, digits that travel between ranks are checksummed before and after, gradients are compared over the ranks,
    and before the update with what they were after the reduction. At every step: weights, optimizer state and buffers are
    what they were after the last one. Place it behind callbacks that change weights.

    Args:
        products_every_n_steps: at every so many steps products, transfers and gradients are checked; None for never.
        rows: how many rows of each product that is rounded, chosen anew each time; None for all.
        state: compare weights, optimizer state and buffers before each step with what they were after the last one.

    Attributes:
        products_checked, transfers_checked, gradients_checked, states_checked: how many, on this rank.

    Raises:
        FaultError: with rank, step, layer and kind. A change that a hook of the module or of another callback may have made
            between two looks is warned of instead. What is wrong is computed, sent or read once more: right the second time
            it is called "transient", else "persistent". Without a verdict where ranks disagree.
        InputError: an interval or a number of rows below 1.
    """

    def __init__(self, *, products_every_n_steps: int | None = 10, rows: int | None = 1, state: bool = True):
        super().__init__()
        for name, number in (("products_every_n_steps", products_every_n_steps), ("rows", rows)):
            if number is not None and (type(number) is not int or number < 1):
                raise InputError(f"{name} is {number!r}; give a whole number from 1, or None")
        self._every, self._state = products_every_n_steps, state
        self._products, self._transfers = ProductCheck(rows, self._wrong_product), TransferCheck()
        self.states_checked = self.gradients_checked = 0
        self._after: dict[str, bytes] | None = None
        self._gradients: dict[str, bytes] | None = None
        self._names: dict[int, str] = {}
        self._strategy: Any = None
        self._rank = self._step = 0
        self._boundary = False  # an epoch ended, or a validation ran, since the last step

    @property
    def products_checked(self) -> int:
        return self._products.checked

    @property
    def transfers_checked(self) -> int:
        return self._transfers.checked

    def on_train_start(self, trainer, pl_module) -> None:
        self._rank, self._after, self._strategy = trainer.global_rank, None, trainer.strategy

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._step = trainer.global_step + 1
        if self._after is not None:
            self.states_checked += 1
            after, self._after = self._after, None
            suspects = self._hooks_between_steps(trainer, pl_module)
            self._compare(lambda: self._digests(trainer, pl_module), after, "memory", "between the steps", suspects)
        self._boundary = False
        if self._due and watch(self._products):
            self._names = {parameter.data_ptr(): name for name, parameter in pl_module.named_parameters()}
            self._transfers.start()

    def on_after_backward(self, trainer, pl_module) -> None:
        if not self._due:
            return
        wrong = self._transfers.judge()
        if wrong is not None:
            raise self._fault(
                wrong.label,
                "digits in flight",
                "persistent" if wrong.persistent else "transient",
                f"sums for the gradients of {wrong.label} left {_sender(wrong.source)} and came to rank {wrong.rank} changed"
                + (", also when they were sent again" if wrong.persistent else "; sent again they were right"),
                rank=wrong.rank,
            )
        gradients = named_states(pl_module, [])["gradients"]
        if not gradients:
            return  # a micro-batch before the last
        found = digests_of(gradients)
        drift = drift_of(found)
        if drift is not None:
            (rank, names), what = min(drift.ranks.items()), f"reduced gradients differ between ranks: {drift.words}"
            raise self._fault(names[0], "gradient", None, what, rank=rank)
        hooks = {
            "behind": ["on_after_backward"],
            "ahead": ["on_before_optimizer_step"],
            "of_module": ["on_after_backward"],
        }
        by_hand = not pl_module.automatic_optimization
        self._gradients = None if by_hand or foreign_hooks(trainer, pl_module, self, **hooks) else found

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        before, self._gradients = self._gradients, None
        if before is not None:
            self.gradients_checked += 1
            self._compare(
                lambda: digests_of(named_states(pl_module, [])["gradients"]), before, "gradient", "before the update"
            )

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self._boundary = True

    def on_validation_start(self, trainer, pl_module) -> None:
        self._boundary = True

    def _hooks_between_steps(self, trainer, pl_module) -> list[str]:
        """Those that ran since the last step and may have changed its state."""
        own, others = ["on_train_batch_end"], _BOUNDARY if self._boundary else []
        return foreign_hooks(
            trainer,
            pl_module,
            self,
            of_module=[*own, *others],
            ahead=["on_train_batch_start", *others],
            behind=[*own, *others],
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._stop()
        if self._state:
            self._after = self._digests(trainer, pl_module)

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._stop()

    def teardown(self, trainer, pl_module, stage: str) -> None:
        self._stop()

    @property
    def _due(self) -> bool:
        return self._every is not None and self._step % self._every == 0

    def _stop(self) -> None:
        unwatch(self._products)
        self._transfers.stop()

    @staticmethod
    def _digests(trainer, pl_module) -> dict[str, bytes]:
        states = named_states(pl_module, trainer.optimizers)
        return {f"{kind} {name}": each for kind in _STATE for name, each in digests_of(states[kind]).items()}

    def _compare(
        self,
        digests: Callable[[], Mapping[str, bytes]],
        before: Mapping[str, bytes],
        kind: str,
        when: str,
        suspects: Sequence[str] = (),
    ) -> None:
        """suspects: hooks that may have made a change; it is told then, and nobody accused."""
        now = digests()
        changed = sorted(name for name in now.keys() & before.keys() if now[name] != before[name])
        if not changed:
            return
        if suspects:
            warn(
                f"FaultGuard: {', '.join(changed[:5])} changed {when}; {', '.join(suspects)} may have done it, or memory. "
                f"Place the guard behind callbacks that change the model, or set state=False",
                stacklevel=2,
            )
            return
        again = digests()
        transient = all(again[name] == before[name] for name in changed)
        raise self._fault(
            changed[0],
            kind,
            "transient" if transient else "persistent",
            f"{', '.join(changed[:5])} changed {when}, where nothing may change it"
            + (
                "; read again it is as before: a fault of the moment"
                if transient
                else ", and stays changed: memory, or code outside of all hooks"
            ),
        )

    def _wrong_product(self, wrong: WrongProduct) -> None:
        layer = self._names.get(wrong.operand.data_ptr()) or f"a layer with an operand {list(wrong.operand.shape)}"
        if wrong.kind == GRADIENT_DIGITS:
            layer = self._open_parameter() or layer
        raise self._fault(
            layer,
            wrong.kind,
            "persistent" if wrong.persistent else "transient",
            f"a {wrong.kind} of {layer} is not the exact one; computed again it is "
            + ("wrong too: the processor or the kernel" if wrong.persistent else "right: a fault of the moment"),
        )

    def _open_parameter(self) -> str | None:
        """The parameter whose digits the backward pass is adding to."""
        reducer = getattr(self._strategy, "_reducer", None)
        collecting = getattr(reducer, "collecting", None)
        return None if collecting is None else collecting[0]

    def _fault(self, layer: str, kind: str, verdict: str | None, what: str, *, rank: int | None = None) -> FaultError:
        rank = self._rank if rank is None else rank
        return FaultError(
            f"silent data corruption on rank {rank} in step {self._step}: {what}. Go back to a checkpoint before this "
            f"step, on another machine if it comes again",
            rank=rank,
            step=self._step,
            layer=layer,
            kind=kind,
            verdict=verdict,
        )


def _sender(rank: int | None) -> str:
    return "the ranks that added them up" if rank is None else f"rank {rank}"
