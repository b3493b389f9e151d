"""Every sample is evaluated or predicted exactly once, at every number of ranks."""

import pytest
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from det_lightning.replay.run import QUIET_TRAINER
from tests.claims.processes import Failed, in_new_process, on_ranks
from tests.claims.trainings import spread_samples
from tests.strategies.small_fits import Seen, trainer_of


def evaluate(rank, world_size, port, samples: int, batch: int):
    one = trainer_of(rank, world_size, port, max_steps=4, num_sanity_val_steps=0)
    loader = DataLoader(spread_samples(samples), batch_size=batch)
    module = Seen()
    one.fit(module, DataLoader(spread_samples(48), batch_size=12 // world_size), loader)
    values = [{name: float(value) for name, value in one.callback_metrics.items()}]
    values += [one.validate(module, loader, verbose=False)[0], one.test(module, loader, verbose=False)[0]]
    if samples < world_size:
        return values, None  # refused, see below
    predicted = [row.numpy().tobytes() for part in one.predict(module, loader) for row in part]
    assert one.validate(module, loader, verbose=False)[0] == values[1]
    assert type(module.hidden) is nn.Linear
    return values, predicted


@pytest.mark.parametrize(("samples", "batch"), [(21, 4), (13, 4), (2, 4)])
def test_C39_C40_every_sample_is_evaluated_exactly_once(samples, batch):
    x, y = spread_samples(samples).tensors
    mean = float((y * 2).double().mean().float())
    expected = sorted(row.numpy().tobytes() for row in x)
    for world_size in (1, 2, 3):
        ranks = on_ranks(world_size, evaluate, samples, batch)
        for values, _ in ranks:
            assert [each["count"] for each in values] == [samples] * 3
            assert values[0] == values[1] == values[2] == ranks[0][0][0]
            assert values[0]["mean_position"] == values[0]["inferred"]
            assert values[0]["inferred"] == mean
        if samples >= world_size:
            assert sorted(row for _, predicted in ranks for row in predicted) == expected


def predict_two(rank, world_size, port):
    return trainer_of(rank, world_size, port).predict(Seen(), DataLoader(spread_samples(2), batch_size=1))


def test_predicting_fewer_samples_than_ranks_is_refused_with_both_numbers():
    with pytest.raises(Failed, match=r"Trainer\.predict got 2 samples for 3 ranks.*devices=2 or fewer"):
        on_ranks(3, predict_two)


def predict_two_forked() -> None:
    three = Trainer(strategy="det_fork", accelerator="cpu", devices=3, **QUIET_TRAINER)
    three.predict(Seen(), [DataLoader(spread_samples(3)), DataLoader(spread_samples(2))])


def test_predicting_fewer_samples_than_ranks_is_refused_where_the_ranks_are_forked():
    with pytest.raises(Failed, match=r"Trainer\.predict got 2 samples for 3 ranks.*devices=2 or fewer"):
        in_new_process(predict_two_forked)


def predict_several(rank, world_size, port) -> tuple[list[int], list[str]]:
    one = trainer_of(rank, world_size, port)
    loaders = [DataLoader(spread_samples(samples)) for samples in (2, 5)]
    lengths = [len(batches) for batches in one.predict(Seen(), loaders)]
    return lengths, sorted(vars(one.predict_loop._data_source))


def test_several_loaders_are_predicted_and_the_trainer_is_as_before():
    assert on_ranks(2, predict_several) == [([1, 3], ["instance", "name"]), ([1, 2], ["instance", "name"])]


def test_dropping_the_last_of_an_evaluation_drops_the_same_samples_at_every_split():
    counts = {world: on_ranks(world, evaluate_dropping, 21, 4)[0] for world in (1, 2, 3)}
    assert counts == {1: 20, 2: 20, 3: 20}


def evaluate_dropping(rank, world_size, port, samples: int, batch: int) -> int:
    loader = DataLoader(spread_samples(samples), batch_size=batch, drop_last=True)
    return int(trainer_of(rank, world_size, port).validate(Seen(), loader, verbose=False)[0]["count"])
