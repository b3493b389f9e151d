"""`strategy="det"` for `pytorch_lightning`."""

from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy

from det_lightning.strategies.det_precision import DetPrecisionMixin, PrecisionProperty
from det_lightning.strategies.det_strategy import DetStrategyMixin


class DetPrecision(DetPrecisionMixin, Precision):
    """Float32 precision with exact clipping and fixed optimizer sequences."""


class DetStrategy(PrecisionProperty, DetStrategyMixin, DDPStrategy):
    """Trains to the same bits at any world size, micro-batch size and accumulation."""

    stock_precision = Precision
    det_precision = DetPrecision
