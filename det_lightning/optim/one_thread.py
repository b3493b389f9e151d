"""For sums of floats by torch's own kernels: on a CPU their bits depend on the number of threads, which launchers choose by
the number of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes on one thread of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
