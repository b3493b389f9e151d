"""Two versions of the user's code: `git bisect run` finds the commit, `bisect --replay --cwd` the operation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.claims.processes import in_new_process

ROOT = Path(__file__).parents[2]
LOSS_LINE = "        return F.cross_entropy(self.net(x), y)\n"
NETWORK = f"""
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 7 / 8 - 0.375)

    def training_step(self, batch, batch_idx):
        x, y = batch
{LOSS_LINE}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.5)

def build():
    x = torch.arange(180, dtype=torch.float32).reshape(30, 6) % 11 / 8
    return Network(), DataLoader(TensorDataset(x, torch.arange(30) % 3), batch_size=6, shuffle=True)
"""
# Each commit in turn; the planted one rounds once more in the forward pass.
PLANTED = "round the logits to bfloat16"
HISTORY = {
    "first version": NETWORK,
    "comment": f"# how the run is built\n{NETWORK}",
    "broken": "this does not compile\n",
    "mended": f"# how this run is built\n{NETWORK}",
    PLANTED: NETWORK.replace(LOSS_LINE, LOSS_LINE.replace("self.net(x)", "self.net(x).bfloat16().float()")),
    "after": "# tidy\n"
    + NETWORK.replace(LOSS_LINE, LOSS_LINE.replace("self.net(x)", "self.net(x).bfloat16().float()")),
}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout.strip()


def environment() -> dict[str, str]:
    """The package of this tree, and no byte code: a checkout within one second would leave a stale one."""
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def record(folder: Path, ledger: Path) -> None:
    from det_lightning.callbacks.weight_ledger import WeightLedger
    from lightning.pytorch import Trainer

    from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
    from det_lightning.strategies.lightning_strategy import DetStrategy

    quiet_lightning()
    sys.path.insert(0, str(folder))
    import network

    module, loader = network.build()
    callbacks = [WeightLedger(ledger, entry="network:build")]
    strategy = DetStrategy(seed=2)
    Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=4, callbacks=callbacks, **QUIET_TRAINER).fit(
        module, loader
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """(repository, commit of each message, ledgers of the first and the last version)."""
    folder = tmp_path_factory.mktemp("history")
    repository = folder / "repository"
    repository.mkdir()
    git(repository, "init", "-q", "-b", "main")
    commits, ledgers = {}, []
    for message, text in HISTORY.items():
        (repository / "network.py").write_text(text)
        git(repository, "add", "network.py")
        git(repository, "commit", "-q", "-m", message)
        commits[message] = git(repository, "rev-parse", "HEAD")
        if message in ("first version", "after"):
            ledgers.append(folder / message.replace(" ", "_"))
            in_new_process(record, repository, ledgers[-1])
    return repository, commits, ledgers


def test_git_bisect_run_names_the_commit_that_moved_the_bits(history):
    repository, commits, ledgers = history
    git(repository, "bisect", "start", commits["after"], commits["first version"])
    try:
        command = [sys.executable, "-m", "det_lightning", "replay", str(ledgers[0])]
        said = git(repository, "bisect", "run", *command)
    finally:
        git(repository, "bisect", "reset")
    assert f"{commits[PLANTED]} is the first bad commit" in said


@pytest.mark.slow
def test_bisect_of_two_worktrees_names_the_operation_that_only_one_of_them_runs(history, tmp_path):
    repository, commits, ledgers = history
    trees = [tmp_path / "before", tmp_path / "after"]
    for tree, message in zip(trees, ("first version", "after"), strict=True):
        git(repository, "worktree", "add", "-q", "--detach", str(tree), commits[message])
    where = [argument for tree in trees for argument in ("--cwd", str(tree))]
    command = [sys.executable, "-m", "det_lightning", "bisect", *map(str, ledgers), "--replay", "--json", *where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False)
    assert done.returncode == 1, done.stderr
    inside = json.loads(done.stdout)["inside"]
    assert inside["verdict"] == "found"
    candidate = inside["difference"]["candidate"]
    assert (inside["difference"]["kind"], candidate["phase"], candidate["name"]) == ("code", "forward", "aten._to_copy")
    assert candidate["place"].startswith("network.py:") and "training_step" in candidate["place"]
    assert inside["element"]["dtype"] == "float32" and inside["element"]["ulps"] > 0
