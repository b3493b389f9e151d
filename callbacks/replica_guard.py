"""Stops a training in which a replica drifts: names the step, the rank and the tensors."""

from collections.abc import Iterable, Mapping

from det_lightning.callbacks.lightning_namespace import Callback
from det_lightning.callbacks.recording import schedule_of
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.started_digests import digests_of

from det_lightning.distributed.replicas import drift_of
from det_lightning.errors import InputError, ReplicaError

_SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")


class ReplicaGuard(Callback):
    """Compares the copies of all ranks after each optimizer step; place it behind the callbacks that change weights.

    Args:
        kinds: of "weights", "buffers", "optimizer", "gradients"; a mapping says every how many steps.

    Raises:
        ReplicaError: on every rank, after the first step at which the copies differ.
        InputError: an unknown kind, or, at the start of training, a strategy whose ranks hold no copies.
    """

    def __init__(self, kinds: Iterable[str] | Mapping[str, int] = ("weights", "buffers", "optimizer")):
        super().__init__()
        self._every = schedule_of(kinds)
        self._step = 0

    def on_train_start(self, trainer, pl_module) -> None:
        name = type(trainer.strategy).__name__
        if any(word in name for word in _SHARDED):
            raise InputError(
                f"under {name} the ranks hold shards, not copies, so there is nothing to compare; leave ReplicaGuard out"
            )
        self._step = trainer.global_step
        self._compare(trainer, pl_module, list(self._every))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._compare(trainer, pl_module, [kind for kind, every in self._every.items() if self._step % every == 0])

    def _compare(self, trainer, pl_module, kinds: list[str]) -> None:
        if not kinds or trainer.world_size < 2:
            return
        states = named_states(pl_module, trainer.optimizers)
        digests = {f"{kind} {name}": digest for kind in kinds for name, digest in digests_of(states[kind]).items()}
        drift = drift_of(digests)
        if drift is not None:
            raise ReplicaError(
                f"after step {self._step} the replicas differ: {drift.words}. A replica that drifts has computed or "
                f"received something else than the others: look at the memory and the links of that rank, and at code that "
                f"treats ranks unlike",
                step=self._step,
                ranks=drift.ranks,
            )
