"""`strategy="det"` for Fabric of `lightning.fabric`."""

from lightning.fabric.strategies import DDPStrategy

from det_lightning.strategies.fabric_strategy import FabricMixin


class FabricDetStrategy(FabricMixin, DDPStrategy):
    """Trains to the same bits at any world size, micro-batch size and accumulation, in a loop of the user's own."""
