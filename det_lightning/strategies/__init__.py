"""Lightning strategies. `DetStrategy` (Trainer) and `FabricDetStrategy` (Fabric) are the classes for the Lightning namespace
that is in use.
"""

import sys
from importlib import import_module

# Name -> (namespace of `lightning`, its module here), (namespace that stands alone, its module here).
_MODULES = {
    "DetStrategy": (("lightning.pytorch", "lightning_strategy"), ("pytorch_lightning", "pytorch_lightning_strategy")),
    "FabricDetStrategy": (("lightning.fabric", "fabric_of_lightning"), ("lightning_fabric", "fabric_alone")),
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(
            f"module 'det_lightning.strategies' has no attribute {name!r}; it has {', '.join(_MODULES)}"
        )
    (together, first), (alone, second) = _MODULES[name]
    module = second if alone in sys.modules and together not in sys.modules else first
    return getattr(import_module(f"det_lightning.strategies.{module}"), name)
