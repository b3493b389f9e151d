"""Limits of an epoch, tuners, and callbacks that decide on what was measured: the same at every split, or refused."""

from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, Sampler

from det_lightning.errors import InputError, UncoveredError
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import Background, Failed, on_ranks
from tests.claims.test_resume import assert_continues
from tests.claims.test_world_size import assert_same_training
from tests.claims.trainings import Network, Run, Split, bytes_of, spread_samples, train
from tests.strategies.small_fits import Seen, plain, trainer_of

RUN = Run(split=Split(1, 12, 1), samples=58, steps=9, options={"global_batch": 12}, loader={"shuffle": True})
OTHER_SPLITS = [Split(1, 1, 3), Split(2, 1, 2)]


def outcome_of(run: Run):
    return on_ranks(run.split.world_size, train, run)[0] if run.split.world_size > 1 else train(0, 1, free_port(), run)


@cache
def whole(name: str, limit: float):
    return outcome_of(replace(RUN, trainer={name: limit}))


# Parts of an epoch


@pytest.mark.parametrize(("name", "limit"), [("limit_train_batches", 0.5), ("overfit_batches", 0.5)])
def test_a_fraction_of_an_epoch_is_a_number_of_whole_steps(name, limit):
    run = replace(RUN, trainer={name: limit})
    for split in OTHER_SPLITS:
        assert_same_training(outcome_of(replace(run, split=split)), whole(name, limit))
    assert whole(name, limit).epoch == 5, "two of five steps an epoch"


def test_a_fraction_of_an_epoch_goes_on_at_another_split_and_the_trainer_keeps_it(tmp_path, trainer):
    run = replace(RUN, trainer={"limit_train_batches": 0.5})
    outcome_of(replace(run, split=OTHER_SPLITS[1], steps=5, checkpoint=tmp_path / "stopped.ckpt"))
    resumed = outcome_of(replace(run, resume=tmp_path / "stopped.ckpt"))
    assert_continues(resumed, whole("limit_train_batches", 0.5), 5)
    one = trainer(limit_train_batches=0.5)
    one.fit(Network(), DataLoader(spread_samples(48), batch_size=12))
    assert one.limit_train_batches == 0.5 and one.current_epoch == 4


def test_a_fraction_of_less_than_a_step_is_refused():
    with pytest.raises(InputError, match=r"limit_train_batches=0\.1 of 5 optimizer steps is less than one step"):
        outcome_of(replace(RUN, trainer={"limit_train_batches": 0.1}))


class Backwards(Sampler):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(range(len(self.data))[::-1])

    def __len__(self):
        return len(self.data)


class InParts(Backwards):
    """A batch sampler whose batches are the same at every split."""

    def __iter__(self):
        return iter([*range(first, first + 4)] for first in range(0, len(self.data), 4))

    def __len__(self):
        return len(self.data) // 4


DATA = spread_samples(44)
EVALUATIONS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "a sampler": {"sampler": Backwards(DATA)},
    "a sampler, dropping": {"sampler": Backwards(DATA), "drop_last": True, "batch_size": 5},
    "a batch sampler": {"batch_sampler": InParts(DATA)},
}


def evaluate_a_part(rank, world_size, port, batch: int, limit: float) -> dict[str, list[dict[str, float]]]:
    """Of a third of the data by validate, test, and the validation of a fit."""
    limits = {"limit_val_batches": limit, "limit_test_batches": limit}
    found = {}
    for name, options in EVALUATIONS.items():
        one = trainer_of(rank, world_size, port, max_steps=1, val_check_interval=1, **limits)
        loader = DataLoader(DATA, **{"batch_size": 1 if "batch_sampler" in options else batch, **options})
        module = Seen()
        found[name] = [one.validate(module, loader, verbose=False)[0], one.test(module, loader, verbose=False)[0]]
        one.fit(module, DataLoader(DATA, batch_size=12 // world_size), loader)
        found[name].append({key: float(value) for key, value in one.callback_metrics.items()})
        assert (one.limit_val_batches, one.limit_test_batches) == (limit, limit)
    return found


def test_a_fraction_of_an_evaluation_is_of_the_same_samples_at_every_split():
    for limit, counts in ((0.35, [15, 15, 15, 14, 12]), (1.0, [44, 44, 44, 40, 44])):
        expected = on_ranks(1, evaluate_a_part, 10, limit)[0]
        assert [[each["count"] for each in found] for found in expected.values()] == [[count] * 3 for count in counts]
        for world_size, batch in ((2, 5), (3, 1)):
            assert on_ranks(world_size, evaluate_a_part, batch, limit)[0] == expected


class Skipping(Network):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


def test_skipping_the_rest_of_an_epoch_is_refused():
    with pytest.raises(UncoveredError, match="on_train_batch_start returned -1, which skips the rest"):
        outcome_of(replace(RUN, build=Skipping))


# Data


def fit_unlike(rank, world_size, port, samples: int, validation: int):
    loaders = [
        DataLoader(spread_samples(count), batch_size=4) for count in (48 - samples * rank, 9 - validation * rank)
    ]
    trainer_of(rank, world_size, port).fit(Network(), *loaders)


@pytest.mark.parametrize(("samples", "validation", "numbers"), [(4, 0, "48, rank 1 has 44"), (0, 1, "9, rank 1 has 8")])
def test_ranks_that_hold_unlike_data_are_refused_with_both_numbers(samples, validation, numbers):
    with pytest.raises(Failed, match=f"unlike data: rank 0 has samples = {numbers}"):
        on_ranks(2, fit_unlike, samples, validation)


def test_a_validation_without_a_batch_is_left_out(trainer):
    module = Network()
    nothing = DataLoader(spread_samples(3), batch_size=4, drop_last=True)
    trainer(num_sanity_val_steps=2).fit(module, DataLoader(spread_samples(48), batch_size=12), nothing)
    assert bytes_of(module) == plain()[-1]


def test_one_loader_in_a_combined_loader_is_one_loader(trainer):
    class Named(Network):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["only"], batch_idx)

    module = Named()
    trainer().fit(module, CombinedLoader({"only": DataLoader(spread_samples(48), batch_size=12)}, "min_size"))
    assert bytes_of(module) == plain()[-1]


class Damaged(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index == 45:
            raise ValueError("sample 45 is damaged")
        x, y = spread_samples(48).tensors
        return x[index], y[index]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_loaded_ends_every_rank_with_one_clear_message(workers):
    port = free_port()
    run = Run(split=Split(2, 6, 1), loaders=DataLoader(Damaged(), batch_size=6, num_workers=workers), steps=8)
    ranks = [Background(train, rank, 2, port, run) for rank in range(2)]
    messages = {}
    for rank in (1, 0):
        with pytest.raises(Failed) as failed:
            ranks[rank].result()
        messages[failed.value.kind] = failed.value.message
    assert "sample 45 is damaged" in messages["ValueError"]
    assert "rank 0 lost another rank while gradients were added up" in messages["LostRankError"]
    assert "start the run again from its last checkpoint" in messages["LostRankError"]


# Compiled models


def test_a_compiled_model_and_a_compiled_layer_are_refused_by_name(trainer):
    whole, wrapped, inside = torch.compile(Network(), backend="eager"), Network(), Network()
    wrapped.hidden = torch.compile(wrapped.hidden, backend="eager")
    inside.output.compile(backend="eager")
    names = ("the model Network", "the module hidden", "the module output")
    for module, name in zip((whole, wrapped, inside), names, strict=True):
        with pytest.raises(UncoveredError, match=f"{name} was compiled"):
            trainer().fit(module, DataLoader(spread_samples(48), batch_size=12))
        dist.destroy_process_group()


# Tuners


class Tuned(Network):
    def train_dataloader(self):
        return DataLoader(spread_samples(48), batch_size=12)


def test_the_finder_of_learning_rates_moves_no_bit_of_the_fit_that_follows(trainer, tmp_path):
    module, one = Tuned(), trainer(enable_checkpointing=True, default_root_dir=tmp_path)
    found = Tuner(one).lr_find(module, num_training=20, min_lr=1e-4, update_attr=False, attr_name="rate")
    assert len(set(found.results["loss"])) > 10
    one.fit(module)
    assert bytes_of(module) == plain()[-1]


def test_the_finder_of_learning_rates_is_refused_where_it_would_see_a_part_of_the_batch(trainer, tmp_path):
    one = trainer(enable_checkpointing=True, accumulate_grad_batches=2, default_root_dir=tmp_path)
    with pytest.raises(UncoveredError, match="1 ranks and accumulate_grad_batches=2 the rate it finds would depend"):
        Tuner(one).lr_find(Tuned(), num_training=8, attr_name="rate")


def test_the_finder_of_batch_sizes_is_refused_by_lightning(trainer, tmp_path):
    with pytest.raises(Exception, match="Batch size finder is not supported with distributed strategies"):
        trainer(BatchSizeFinder(), enable_checkpointing=True, default_root_dir=tmp_path).fit(Tuned())


# Decisions on what was measured


class Validations(Callback):
    """Steps at which there was a validation."""

    steps: ClassVar[list[int]] = []

    def on_validation_start(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


def decide(rank, world_size, port, split: Split, folder):
    """Stops early on a validation at half an epoch; keeps the best of values that are often equal."""
    Validations.steps.clear()
    stop = EarlyStopping("validation_loss", patience=3, min_delta=0.05, check_on_train_epoch_end=False)
    best = ModelCheckpoint(folder, monitor="coarse", save_top_k=2, filename="{step}", mode="min")
    one = trainer_of(
        rank,
        world_size,
        port,
        stop,
        best,
        Validations(),
        max_steps=60,
        num_sanity_val_steps=0,
        val_check_interval=0.5,
        accumulate_grad_batches=split.accumulate,
        enable_checkpointing=True,
    )
    module = Coarse()
    loaders = [DataLoader(spread_samples(count, spread=0), batch_size=split.batch) for count in (60, 13)]
    one.fit(module, *loaders)
    return (
        one.global_step,
        bytes_of(module),
        list(Validations.steps),
        sorted(path.rpartition("/")[2] for path in best.best_k_models),
    )


class Coarse(Network):
    """Logs a value that is the same at every validation."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("coarse", 1.0, sync_dist=True)


def test_decisions_on_validations_within_an_epoch_are_the_same_at_every_split(tmp_path):
    splits = [Split(1, 12, 1), Split(1, 4, 3), Split(2, 6, 1), Split(3, 2, 2)]
    outcomes = [on_ranks(split.world_size, decide, split, tmp_path / str(split))[0] for split in splits]
    assert outcomes[1:] == outcomes[:1] * 3
    steps, _, validations, kept = outcomes[0]
    assert validations[:4] == [2, 4, 7, 9] and steps < 60 and len(kept) == 2
