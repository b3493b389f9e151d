"""Lightning strategies. `DetStrategy` is the class for the Lightning namespace that is in use."""

import sys
from importlib import import_module


def __getattr__(name: str):
    if name != "DetStrategy":
        raise AttributeError(f"module 'det_lightning.strategies' has no attribute {name!r}; it has DetStrategy")
    standalone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    namespace = "pytorch_lightning" if standalone else "lightning"
    return import_module(f"det_lightning.strategies.{namespace}_strategy").DetStrategy
