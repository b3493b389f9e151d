"""What of a Trainer would make a run depend on its split, or is not covered: refused before the first step."""

from typing import Any

import torch

from det_lightning.errors import UncoveredError


def check_schedules(configs: list[Any], accumulate: int) -> None:
    """Lightning counts micro-batches where a scheduler steps at every so many steps."""
    for config in configs:
        if config.interval == "step" and config.frequency > 1 and accumulate > 1:
            raise UncoveredError(
                f'{type(config.scheduler).__name__} has "interval": "step" and "frequency": {config.frequency}, which '
                f"Lightning counts in micro-batches: with accumulate_grad_batches={accumulate} it would step after other "
                f"optimizer steps than without. Leave frequency at 1, and let the schedule itself count, for example "
                f"StepLR(optimizer, step_size={config.frequency})."
            )


def check_rate_finder(trainer, world_size: int) -> None:
    """Lightning's finder looks at the loss of the first rank's last micro-batch: a part of the global batch."""
    looks = any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks)
    if looks and world_size * trainer.accumulate_grad_batches > 1:
        raise UncoveredError(
            f"the learning rate finder looks at the loss of one micro-batch on one rank, so with {world_size} ranks and "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} the rate it finds would depend on the cut. Run it "
            f"on one device without accumulation, with the global batch as batch_size, and pass the rate that it suggests."
        )


def check_trainer(trainer, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise UncoveredError(
            f'strategy="det" computes on CPU and CUDA, not on {device}. Pass Trainer(accelerator="cpu") or "gpu".'
        )
