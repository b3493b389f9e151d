"""A process that took part in exchanges over gloo does not end before gloo's threads have let go of its tensors."""

import subprocess
import sys

import pytest

# What is registered first is called last.
SCRIPT = """
import atexit, time
import torch.distributed as dist
from det_lightning.distributed.exchange import Exchange

slept = []
atexit.register(lambda: print(len(slept), sum(slept) >= 0.1))
time.sleep = slept.append
dist.init_process_group("gloo", "file://{file}", rank=0, world_size=1)
for _ in range({exchanges}):
    Exchange()
"""


@pytest.mark.parametrize(("exchanges", "told"), [(0, "0 False"), (3, "1 True")])
def test_it_waits_once_and_only_after_an_exchange(tmp_path, exchanges, told):
    script = SCRIPT.format(file=tmp_path / "store", exchanges=exchanges)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (found.returncode, found.stdout.strip()) == (0, told), found.stderr
