"""Settings shared by all tests. The markers are described in pyproject.toml."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Two threads everywhere, also in child processes: enough to see a race, the same on every machine.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "2")

# The first example pays for compiling kernels, and a machine may be busy: nothing is judged by the clock. The same examples
# come on every run.
settings.register_profile(
    "det_lightning", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("det_lightning")


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """Lightning's seed_everything leaves its seed in the environment, where the next test's training would find it."""
    before = os.environ.copy()
    yield
    for name in os.environ.keys() | before.keys():
        if name.startswith("PL_") and os.environ.get(name) != before.get(name):
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}
