"""Fabric finds the strategy by name in both of its namespaces, and under its launchers."""

import pytest

from tests.strategies.test_registration import NAMES, ROOT, python

SCRIPT = str(ROOT / "tests" / "strategies" / "launched_fabric.py")
MODULES = {"lightning.fabric": "fabric_of_lightning", "lightning_fabric": "fabric_alone"}
LISTED = """
import {first}
import {second}
from lightning.fabric.strategies import STRATEGY_REGISTRY as ours
from lightning_fabric.strategies import STRATEGY_REGISTRY as theirs
for registry, module in ((ours, "fabric_of_lightning"), (theirs, "fabric_alone")):
    for name in {names!r}:
        assert type(registry.get(name)).__module__ == "det_lightning.strategies." + module
from det_lightning import FabricDetStrategy
print(FabricDetStrategy.__module__)
"""


@pytest.mark.parametrize(
    ("namespace", "strategy", "devices"),
    [
        ("lightning.fabric", "det", 2),
        ("lightning_fabric", "det", 2),
        ("lightning.fabric", "det_fork", 3),
        pytest.param("lightning.fabric", "det_spawn", 2, marks=pytest.mark.slow),
    ],
)
def test_every_launcher_of_fabric_gives_the_same_bytes(namespace, strategy, devices):
    module, _, steps, digest = python(SCRIPT, namespace, "det", "1").split()
    assert (module, steps) == (f"det_lightning.strategies.{MODULES[namespace]}", "6")
    assert python(SCRIPT, namespace, strategy, str(devices)).split() == [module, str(devices), "6", digest]


@pytest.mark.parametrize("order", [("lightning.fabric", "det_lightning"), ("det_lightning", "lightning_fabric")])
def test_importing_the_package_registers_it_before_and_after(order):
    found = python("-c", LISTED.format(first=order[0], second=order[1], names=NAMES)).strip()
    assert found == "det_lightning.strategies.fabric_of_lightning"


def test_with_the_fabric_that_stands_alone_the_class_is_its_own():
    code = "import lightning_fabric\nfrom det_lightning import FabricDetStrategy as ours\n"
    code += "import sys\nprint(ours.__module__, issubclass(ours, lightning_fabric.strategies.Strategy))\n"
    code += "print('lightning.fabric' in sys.modules)"
    assert python("-c", code).split() == ["det_lightning.strategies.fabric_alone", "True", "False"]
