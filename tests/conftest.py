"""Settings shared by all tests. The markers are described in pyproject.toml."""

import os

from hypothesis import settings

# Two threads everywhere, also in child processes: enough to see a race, the same on every machine.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "2")

# The first example pays for compiling kernels, so there is no deadline; the same examples come on every run.
settings.register_profile("det_lightning", deadline=None, derandomize=True)
settings.load_profile("det_lightning")
