"""The exported kernel, loaded in a fresh process without det_lightning on the path, runs the usage code of the seed's card.

`kernels.get_local_kernel` loads it where the library is installed; where it is not, the folder is loaded as that function
does it: `__init__.py` under the name `metadata.json` gives. Both work offline.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

# As it stands on the card, but for the name of the device.
USAGE = """
import torch
from kernels import get_kernel

dt = get_kernel("phanerozoic/det-train", version=1, trust_remote_code=True)

layer = dt.DetLinear(4096, 4096, device="cuda")
y = layer(x); y.square().mean().backward() # deterministic fwd and bwd

# tensor parallelism over K: shards compose bit-identically
a1 = dt.det_gemm_partial(x[:, :2048], w[:, :2048])
a2 = dt.det_gemm_partial(x[:, 2048:], w[:, 2048:])
y_sharded = dt.det_finalize(dt.det_combine([a1, a2]))
assert torch.equal(y_sharded, dt.det_gemm(x, w))

# data/tensor parallel: sum long-accumulator digits across ranks, exactly
acc = dt.det_all_reduce(dt.det_gemm_partial(x_shard, w_shard))
y = dt.det_finalize(acc) # identical at any world size
"""

LOADING = """
import importlib.util, json, sys, types
from pathlib import Path

variant = Path(sys.argv[1])

def get_kernel(name, version, trust_remote_code):
    identity = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(identity, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[identity] = module
    spec.loader.exec_module(module)
    return module

if sys.argv[2] == "library":
    import kernels
    kernels.get_kernel = lambda *arguments, **options: kernels.get_local_kernel(variant.parents[1])
else:
    sys.modules["kernels"] = types.SimpleNamespace(get_kernel=get_kernel)
"""

CHECKS = """
assert "det_lightning" not in sys.modules, "the exported kernel must stand alone"
assert all(layer.weight.grad[i].isfinite().all() for i in range(2)) and layer.weight.grad.any()
assert torch.equal(y, dt.det_gemm(x_shard, w_shard))
assert torch.equal(dt.det_sum(x, 1), dt.det_sum(x.flip(1), 1))
assert sorted(dt.__all__) == sorted(name for name in dt.__all__ if hasattr(dt, name))
assert dt.layers.DetLinear is dt.DetLinear
import hashlib
print(hashlib.sha256(y.detach().cpu().numpy().tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("exported")
    subprocess.run([sys.executable, ROOT / "examples" / "export_kernel.py", target], check=True)
    return target / "build" / "torch-universal"


def run_usage(variant: Path, how: str, device: str) -> str:
    numbers = (
        "import torch\ntorch.manual_seed(0)\nx, w = torch.randn(3, 4096), torch.randn(5, 4096)\n"
        f'x, w = x.to("{device}"), w.to("{device}")\nx_shard, w_shard = x[:, :1000], w[:, :1000]\n'
    )
    usage = USAGE.replace('device="cuda"', f'device="{device}"')
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # The library, if it is installed or on the path; but not this tree.
    paths = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT
    ]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if not (Path(path) / "det_lightning").is_dir())
    finished = subprocess.run(
        [sys.executable, "-c", LOADING + numbers + usage + CHECKS, variant, how],
        cwd=variant.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_the_cards_usage_code_runs_on_the_exported_folder(variant, device):
    digest = run_usage(variant, "folder", device)
    assert len(digest.strip()) == 64


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="the library `kernels` is not installed")
@pytest.mark.parametrize("device", DEVICES)
def test_the_library_loads_the_exported_kernel_offline(variant, device):
    assert run_usage(variant, "library", device) == run_usage(variant, "folder", "cpu")


def test_every_import_inside_the_export_is_relative(variant):
    for path in variant.rglob("*.py"):
        assert "det_lightning" not in [
            word.split(".")[0]
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip().startswith(("import ", "from "))
            for word in [line.split()[1]]
        ], path


def test_the_metadata_names_what_the_loader_needs_and_the_identity_is_of_the_content(tmp_path):
    found = []
    for folder in ("one", "two"):
        subprocess.run([sys.executable, ROOT / "examples" / "export_kernel.py", tmp_path / folder], check=True)
        found.append(json.loads((tmp_path / folder / "build" / "torch-universal" / "metadata.json").read_text()))
    assert found[0] == found[1]
    assert found[0]["name"] == "det-lightning" and found[0]["license"] == "Apache-2.0"
    assert found[0]["python-depends"] == [] and found[0]["backend"] == {"type": "cpu"}
