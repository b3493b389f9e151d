"""The demonstration behind `det-lightning demo`: the same training split in many ways, under `ddp` and under `det`."""

from det_lightning.demo.main import EXPECTED_DIGEST, main

__all__ = ["EXPECTED_DIGEST", "main"]
