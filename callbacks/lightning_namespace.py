"""The Callback base class of the Lightning namespace that is in use, so that a process imports only one of the two."""

import sys
from importlib import import_module

_standalone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
Callback = import_module("pytorch_lightning.callbacks" if _standalone else "lightning.pytorch.callbacks").Callback
