"""A ledger without Lightning: a hand-written loop, alone and on ranks whose copies drift."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from det_lightning.callbacks.plain_ledger import PlainLedger

from det_lightning.bisection.ledgers import compare_ledgers
from det_lightning.errors import InputError, LedgerError
from det_lightning.ledger.store import LedgerReader
from tests.claims.processes import Failed, on_ranks


def train(
    path, *, steps=6, flip_at=None, recorded=True, kinds=("weights", "gradients", "optimizer", "buffers"), **options
):
    """A small loop; returns the final weights as bytes."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.randn(steps, 8, 4)
    ledger = PlainLedger(path, model, optimizer, kinds=kinds, **options) if recorded else None
    for step, batch in enumerate(data, 1):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if ledger is not None:
            ledger.before_step()
        optimizer.step()
        if step == flip_at:
            with torch.no_grad():
                model[2].bias.view(torch.int32)[1] ^= 1
        if ledger is not None:
            ledger.after_step(loss=loss, batch=batch)
    if ledger is not None:
        ledger.close()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def test_a_loop_of_ones_own_is_recorded_unchanged_and_compared(tmp_path):
    assert train(tmp_path / "a") == train(None, recorded=False)
    train(tmp_path / "b")
    train(tmp_path / "c", flip_at=4)
    with LedgerReader(tmp_path / "a") as a, LedgerReader(tmp_path / "b") as b, LedgerReader(tmp_path / "c") as c:
        assert a.verify_chain().sound and a.closed and (a.first_step, a.last_step) == (0, 6)
        assert a.record(6).trace == b.record(6).trace
        first = compare_ledgers(a, c).first
        assert (first.step, [each.name for each in first.tensors]) == (4, ["2.bias"])
        assert set(a.leaves(a.record(1), "buffers")) == {"1.num_batches_tracked", "1.running_mean", "1.running_var"}


def test_kinds_may_be_recorded_at_some_steps_only(tmp_path):
    train(tmp_path / "a", kinds={"weights": 1, "optimizer": 3})
    with LedgerReader(tmp_path / "a") as reader:
        optimizer = [record.agree["roots"]["optimizer"] for record in reader.records()]
        assert [root is not None for root in optimizer] == [True, False, False, True, False, False, True]
        assert reader.verify_chain().sound


def test_misuse_is_named(tmp_path):
    train(tmp_path / "a")
    with pytest.raises(LedgerError, match="already holds a ledger"):
        train(tmp_path / "a")
    with pytest.raises(InputError, match="activations"):
        train(tmp_path / "b", kinds=("activations",))
    with pytest.raises(InputError, match="every 0 steps"):
        train(tmp_path / "b", kinds={"weights": 0})
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="before_step"), PlainLedger(tmp_path / "c", model) as ledger:
        ledger.after_step()
    with LedgerReader(tmp_path / "c") as reader:
        assert not reader.closed


def test_it_needs_no_lightning(tmp_path):
    code = (
        "import sys\nfrom det_lightning import PlainLedger\nimport torch\n"
        f"PlainLedger({str(tmp_path / 'a')!r}, torch.nn.Linear(2, 2)).close()\n"
        "assert not any(name.split('.')[0] in ('lightning', 'pytorch_lightning') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def drift(rank, world, port, path, flip):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        train(path, flip_at=flip if rank == 1 else None, replicas=True)
    finally:
        dist.destroy_process_group()


def test_replicas_that_drift_are_named_by_rank_and_tensor(tmp_path):
    on_ranks(3, drift, tmp_path / "sound", None)
    with pytest.raises(Failed, match=r"after step 3 the replicas differ: rank 1: weights 2\.bias"):
        on_ranks(3, drift, tmp_path / "drifted", 3)
    with LedgerReader(tmp_path / "drifted") as reader:
        assert reader.last_step == 3
