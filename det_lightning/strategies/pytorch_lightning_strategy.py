"""`strategy="det"` for `pytorch_lightning`."""

from typing import ClassVar

from pytorch_lightning.plugins.precision import HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.strategies import DDPStrategy

from det_lightning.strategies.det_precision import DetPrecisionMixin, PrecisionProperty
from det_lightning.strategies.det_strategy import DetStrategyMixin


class DetPrecision(DetPrecisionMixin, Precision):
    """Float32 precision with exact clipping and fixed optimizer sequences."""


class DetHalfPrecision(DetPrecisionMixin, HalfPrecision):
    """Parameters and activations in bfloat16, every exact sum rounded to it once."""


class DetMixedPrecision(DetPrecisionMixin, MixedPrecision):
    """Parameters in float32, operands of products rounded to bfloat16."""


class DetStrategy(PrecisionProperty, DetStrategyMixin, DDPStrategy):
    """Trains to the same bits at any world size, micro-batch size and accumulation."""

    twins: ClassVar = {
        (Precision, "32-true"): DetPrecision,
        (HalfPrecision, "bf16-true"): DetHalfPrecision,
        (MixedPrecision, "bf16-mixed"): DetMixedPrecision,
    }
