"""Records one optimizer step of a Lightning training: its operations, and what it begins and ends with."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from det_lightning.bisection.operation_log import BATCH, GRADIENTS, STATE
from det_lightning.callbacks.run_states import named_states
from det_lightning.replay.operation_recorder import OperationRecorder, tensors_in

_STATE = ("weights", "buffers", "optimizer")


@dataclass(frozen=True)
class Recording:
    """What to record: the operations of optimizer step `step`, one log for each rank in `folder`.

    capture: rank -> indices of operations whose tensors are kept.
    """

    step: int
    folder: Path
    capture: dict[int, tuple[int, ...]]

    def log(self, rank: int) -> Path:
        return self.folder / f"operations-{rank}.jsonl"

    def tensors(self, rank: int) -> Path:
        return self.folder / f"tensors-{rank}.pt"


class StepRecorder(Callback):
    """Place it before every other callback and `after` behind them, so that their operations are recorded too."""

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording
        self.recorder: OperationRecorder | None = None
        self._stack: ExitStack | None = None
        self.after = _Last(self)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        # By hand, several optimizers may step within one batch; the one that is asked for is recorded with the others.
        steps = 1 if pl_module.automatic_optimization else max(1, len(trainer.optimizers))
        if not trainer.global_step < self.recording.step <= trainer.global_step + steps:
            return
        rank = trainer.global_rank
        if self._stack is None:
            capture = self.recording.capture.get(rank, ())
            self.recorder = OperationRecorder(self.recording.log(rank), pl_module, capture)
            self._stack = ExitStack()
            self._stack.enter_context(self.recorder.recording())
            self.recorder.note(STATE, self._named(trainer, pl_module))
        else:
            self.recorder.micro_batch += 1
        self.recorder.phase = "forward"
        self.recorder.note(BATCH, _leaves("batch", batch), samples=_samples(trainer, rank))

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self._phase("backward")

    def on_after_backward(self, trainer, pl_module) -> None:
        self._phase("reduction")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if self.recorder is not None:
            states = named_states(pl_module, [])["gradients"]
            gradients = {f"gradients {name}": gradient for name, gradient in states.items()}
            self.recorder.name(gradients)
            self.recorder.note(GRADIENTS, gradients)
            self.recorder.phase = "update"

    def finish(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        """After the step's last callback."""
        if self.recorder is None:
            return
        if trainer.global_step < self.recording.step:
            self.recorder.phase = "forward"
            return
        self.recorder.phase = "end"
        self.recorder.note(STATE, self._named(trainer, pl_module))
        recorder = self.recorder
        self.stop()
        torch.save(recorder.captured, self.recording.tensors(trainer.global_rank))

    def stop(self) -> None:
        """Off; a second call does nothing."""
        if self._stack is not None:
            self._stack.close()
            self._stack = self.recorder = None

    def on_exception(self, trainer, pl_module, exception) -> None:
        self.stop()

    def teardown(self, trainer, pl_module, stage: str) -> None:
        self.stop()

    def _phase(self, phase: str) -> None:
        if self.recorder is not None:
            self.recorder.phase = phase

    def _named(self, trainer: Any, pl_module: torch.nn.Module) -> dict[str, torch.Tensor]:
        states = named_states(pl_module, trainer.optimizers)
        named = {f"{kind} {name}": each for kind in _STATE for name, each in states[kind].items()}
        self.recorder.name(named)
        return named


class _Last(Callback):
    def __init__(self, recorder: StepRecorder):
        super().__init__()
        self.recorder = recorder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.recorder.finish(trainer, pl_module)


def _leaves(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by its path in it, such as batch[0] or batch['image']."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        return {key: leaf for k, each in value.items() for key, leaf in _leaves(f"{name}[{k!r}]", each).items()}
    if isinstance(value, (list, tuple)):
        return {key: leaf for i, each in enumerate(value) for key, leaf in _leaves(f"{name}[{i}]", each).items()}
    return {f"{name}.{i}": leaf for i, leaf in enumerate(tensors_in(getattr(value, "__dict__", {})))}


def _samples(trainer: Any, rank: int) -> tuple[int, ...] | None:
    """Data set indices of this rank's micro-batch, where the strategy knows them."""
    data = getattr(trainer.strategy, "training_data", None)
    if data is None:
        return None
    here = data.current
    if here.empty:
        return ()
    indices = data.order.arranged(data.order.step(here.epoch, here.step), here.step)
    return tuple(int(index) for index in indices[here.positions[0] : here.positions[1]])
