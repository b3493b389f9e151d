"""The strategy is found by name in both of Lightning's namespaces, by LightningCLI, and under every launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.claims.processes import in_new_process
from tests.strategies import launched

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).parent / "launched.py")
NAMES = ("det", "det_spawn", "det_fork", "det_notebook")
GROUP_VARIABLES = frozenset("MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK NODE_RANK GROUP_RANK".split())


def python(*arguments: str, cwd: Path = ROOT) -> str:
    """Runs a new interpreter; what it wrote to standard output."""
    # A training inside this process leaves the address of its own group behind.
    inherited = {name: value for name, value in os.environ.items() if name not in GROUP_VARIABLES}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=cwd, timeout=600
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def fit_here(out: str) -> str:
    launched.Model = launched.make("lightning.pytorch")
    launched.fit("lightning.pytorch", "det", 1, out)
    return Path(out).read_text().split()[2]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> str:
    """The digest that one rank reaches."""
    return in_new_process(fit_here, str(tmp_path_factory.mktemp("one") / "digest.txt"))


@pytest.mark.parametrize(
    ("strategy", "prefix"),
    [
        ("det", ()),
        ("det_fork", ()),
        pytest.param("det_spawn", (), marks=pytest.mark.slow),
        pytest.param(
            "det", ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"), marks=pytest.mark.slow
        ),
    ],
    ids=["popen", "fork", "spawn", "torchrun"],
)
def test_C45_every_launcher_gives_the_same_bytes(strategy, prefix, tmp_path, one_rank):
    out = tmp_path / "digest.txt"
    python(*prefix, SCRIPT, "lightning.pytorch", strategy, "2", str(out), cwd=tmp_path)
    assert out.read_text().split() == ["2", "7", one_rank]


def test_what_a_forked_rank_raised_is_the_last_word(tmp_path):
    nowhere = str(tmp_path / "no such folder" / "digest.txt")
    with pytest.raises(AssertionError, match="FileNotFoundError") as failed:
        python(SCRIPT, "lightning.pytorch", "det_fork", "2", nowhere, cwd=tmp_path)
    assert "During handling of the above exception" not in str(failed.value)


ORDER = """
import sys
sys.argv = ["x"]
for name in {order!r}:
    __import__(name)
from lightning.pytorch.strategies import StrategyRegistry as ours
from pytorch_lightning.strategies import StrategyRegistry as theirs
for registry, namespace in ((ours, "lightning"), (theirs, "pytorch_lightning")):
    for name in {names!r}:
        strategy = registry.get(name)
        assert type(strategy).__module__ == f"det_lightning.strategies.{{namespace}}_strategy", type(strategy)
        assert any(base.__module__.startswith(namespace + ".") for base in type(strategy).__mro__)
sys.path.insert(0, {folder!r})
import launched
for namespace in ("lightning.pytorch", "pytorch_lightning"):
    launched.Model = launched.make(namespace)
    launched.fit(namespace, "det", 1, {out!r})
    print(open({out!r}).read())
    import torch.distributed
    torch.distributed.destroy_process_group()
"""


def test_importing_the_package_registers_it_in_both_namespaces(tmp_path, one_rank):
    out, order = str(tmp_path / "digest.txt"), ("lightning.pytorch", "det_lightning", "pytorch_lightning")
    code = ORDER.format(order=order, names=NAMES, folder=str(Path(SCRIPT).parent), out=out)
    assert python("-c", code).split() == ["1", "7", one_rank] * 2


STANDALONE = """
import pytorch_lightning, sys
import det_lightning
assert "lightning.pytorch" not in sys.modules
from det_lightning import DetStrategy, WeightLedger
assert issubclass(DetStrategy, pytorch_lightning.strategies.Strategy)
sys.path.insert(0, {folder!r})
import launched
trainer = pytorch_lightning.Trainer(
    strategy=DetStrategy(seed=0), devices=1, callbacks=[WeightLedger({ledger!r})], **launched.ARGUMENTS
)
trainer.fit(launched.make("pytorch_lightning")({out!r}))
assert "lightning.pytorch" not in sys.modules, "both namespaces were loaded"
print(open({out!r}).read())
"""


def test_with_pytorch_lightning_alone_the_other_namespace_is_never_loaded(tmp_path, one_rank):
    out = str(tmp_path / "digest.txt")
    code = STANDALONE.format(folder=str(Path(SCRIPT).parent), out=out, ledger=str(tmp_path / "ledger"))
    assert python("-c", code).split() == ["1", "7", one_rank]
    assert (tmp_path / "ledger" / "ledger.jsonl").exists()


CLI = """
import sys
sys.argv = ["x"]
from lightning.pytorch.cli import LightningCLI
sys.path.insert(0, {folder!r})
import launched
for chosen in {strategies!r}:
    arguments = ["fit", "--model.out", {out!r}, "--trainer.devices", "1"]
    for name, value in launched.ARGUMENTS.items():
        arguments += [f"--trainer.{{name}}", str(value).lower()]
    cli = LightningCLI(
        launched.make("lightning.pytorch"),
        args=[*arguments, *chosen],
        save_config_callback=None,
        seed_everything_default=False,
    )
    print(type(cli.trainer.strategy).__module__, cli.trainer.strategy.training_data.order.global_batch)
    print(open({out!r}).read())
"""
BY_NAME = ["--trainer.strategy", "det"]
BY_CLASS = ["--trainer.strategy", "det_lightning.DetStrategy"]


def test_lightningcli_takes_the_strategy_by_name_and_by_class_path(tmp_path, one_rank):
    # An argument makes jsonargparse see a class: a class path alone also fits a plain name.
    strategies = [
        BY_NAME,
        [*BY_CLASS, "--trainer.strategy.seed", "0"],
        [*BY_CLASS, "--trainer.strategy.global_batch", "9"],
    ]
    code = CLI.format(folder=str(Path(SCRIPT).parent), out=str(tmp_path / "digest.txt"), strategies=strategies)
    words = python("-c", code).split()
    runs = [words[place : place + 5] for place in range(0, len(words), 5)]
    module = "det_lightning.strategies.lightning_strategy"
    assert runs[0] == runs[1] == [module, "12", "1", "7", one_rank]
    assert runs[2][:4] == [module, "9", "1", "7"]
    assert runs[2][4] != one_rank
