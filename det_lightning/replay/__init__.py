"""Runs recorded steps again and compares each record: `replay`, and the tensors of a step: `tensors_at`."""

from det_lightning.replay.replay import ReplayResult, replay, tensors_at

__all__ = ["ReplayResult", "replay", "tensors_at"]
