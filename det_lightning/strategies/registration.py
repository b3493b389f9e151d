"""Registers the strategy names in every Lightning namespace, whether it is imported before or after.

Lightning has no entry point for strategies. Importing `det_lightning` therefore registers the names in the
namespaces already loaded, and a finder on `sys.meta_path` does the same for those imported later in this process.
Neither torch nor lightning is imported here.
"""

import importlib
import importlib.abc
import sys
from types import ModuleType

# Module of Lightning -> its registry, our module, our class.
_STRATEGY_MODULES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_strategy", "DetStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning_strategy", "DetStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "fabric_of_lightning", "FabricDetStrategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "fabric_alone", "FabricDetStrategy"),
}
START_METHODS = {
    "det": "popen",
    "det_spawn": "spawn",
    "det_fork": "fork",
    "det_notebook": "fork",
    # LightningCLI hands a class path that stands alone over as a plain, lower-cased name.
    "det_lightning.detstrategy": "popen",
}


def _register(module: ModuleType) -> None:
    registry_name, target, strategy = _STRATEGY_MODULES[module.__name__]

    def make(**arguments):
        return getattr(importlib.import_module(f"det_lightning.strategies.{target}"), strategy)(**arguments)

    registry = getattr(module, registry_name)
    for name, start_method in START_METHODS.items():
        if name not in registry:
            description = f"Same bits at any world size, launched by {start_method}"
            registry.register(name, make, description=description, start_method=start_method)


class _RegisteringLoader(importlib.abc.Loader):
    """Executes the module with its own loader, then registers the names in it."""

    def __init__(self, inner: importlib.abc.Loader):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.inner
        self.inner.exec_module(module)
        _register(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _STRATEGY_MODULES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


def install() -> None:
    """Registers the names now and for namespaces imported later; calling it again changes nothing."""
    for name in _STRATEGY_MODULES:
        if name in sys.modules:
            _register(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
