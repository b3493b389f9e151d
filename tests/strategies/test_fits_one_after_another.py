"""What follows a fit, or an exception within one: the next fit goes on to the same bytes, and the model is as it was."""

from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from det_lightning.errors import UncoveredError
from det_lightning.layers.linear import DetLinear
from tests.claims.trainings import Network, Split, bytes_of, spread_samples
from tests.strategies.small_fits import PLAIN, here, plain


class Forgetful(Network):
    """No momentum: Lightning makes new optimizers at every fit."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


@cache
def forgetful():
    return here(replace(PLAIN, build=Forgetful)).weights


class RaisesOnce(Forgetful):
    """An exception after half of the third step's micro-batches went backward."""

    def __init__(self):
        super().__init__()
        self.countdown = None

    def on_before_backward(self, loss):
        if self.trainer.global_step == 2 and self.countdown is None:
            self.countdown = self.trainer.accumulate_grad_batches // 2
        if self.countdown == 0:
            self.countdown = -1
            raise RuntimeError("in the middle of a step")
        if self.countdown is not None:
            self.countdown -= 1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_fit_that_follows_an_exception_within_a_step_goes_on_to_the_same_bytes(trainer, accumulate):
    module, loader = RaisesOnce(), DataLoader(spread_samples(48), batch_size=12 // accumulate)
    one = trainer(accumulate_grad_batches=accumulate)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        one.fit(module, loader)
    assert type(module.hidden) is nn.Linear and "log" not in module.__dict__
    assert bytes_of(module) == forgetful()[2]
    assert torch.sigmoid(torch.zeros(1)).item() == 0.5, "the function mode is off"
    one.fit(module, loader)
    assert one.global_step == 8
    assert bytes_of(module) == forgetful()[-1]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_checkpoint_saved_on_an_exception_within_a_step_takes_that_step_anew(trainer, accumulate, tmp_path):
    module, loader = RaisesOnce(), DataLoader(spread_samples(48), batch_size=12 // accumulate)
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=5, filename="saved")
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        trainer(saver, accumulate_grad_batches=accumulate, enable_checkpointing=True).fit(module, loader)
    assert type(module.hidden) is nn.Linear
    resumed = here(replace(PLAIN, build=Forgetful, split=Split(1, 6, 2), resume=tmp_path / "saved.ckpt"))
    assert resumed.weights == forgetful()[2:]


def test_weights_saved_alone_on_an_exception_hide_nothing(trainer, tmp_path):
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, save_weights_only=True, filename="saved")
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        one = trainer(saver, accumulate_grad_batches=3, enable_checkpointing=True)
        one.fit(RaisesOnce(), DataLoader(spread_samples(48), batch_size=4))
    state = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    assert b"".join(tensor.numpy().tobytes() for _, tensor in sorted(state.items())) == forgetful()[2]


def test_a_refusal_leaves_the_model_as_it_was(trainer):
    class Refused(Network):
        def training_step(self, batch, batch_idx):
            return torch.sigmoid(super().training_step(batch, batch_idx))

    module = Refused()
    with pytest.raises(UncoveredError):
        trainer().fit(module, DataLoader(spread_samples(48), batch_size=12))
    assert type(module.hidden) is nn.Linear and "log" not in module.__dict__
    assert torch.sigmoid(torch.zeros(1)).item() == 0.5


def test_layers_are_exact_during_the_fit_and_stock_after_it(trainer):
    class Looks(Callback):
        seen: ClassVar[list[type]] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen.append(type(pl_module.hidden))

    module = Network()
    identities = [id(parameter) for parameter in module.parameters()]
    trainer(Looks()).fit(module, DataLoader(spread_samples(48), batch_size=12))
    assert set(Looks.seen) == {DetLinear}
    assert type(module.hidden) is type(module.output) is nn.Linear
    assert [id(parameter) for parameter in module.parameters()] == identities
    assert list(module.state_dict()) == list(Network().state_dict())


@pytest.mark.parametrize("stop", [4, 6])
def test_a_second_fit_of_one_trainer_goes_on_where_the_first_stood(trainer, stop):
    module, loader = Forgetful(), DataLoader(spread_samples(48), batch_size=12)
    one = trainer(max_steps=stop)
    one.fit(module, loader)
    assert bytes_of(module) == forgetful()[stop]
    one.fit_loop.epoch_loop.max_steps = 8
    one.fit(module, loader)
    assert one.global_step == 8
    assert bytes_of(module) == forgetful()[-1]


def test_the_same_module_trained_by_two_trainers_is_trained_twice(trainer):
    loader = DataLoader(spread_samples(48), batch_size=12)
    module = Network()
    for _ in range(2):
        trainer().fit(module, loader)
    other = Network()
    for _ in range(2):
        trainer().fit(other, loader)
    assert bytes_of(module) == bytes_of(other) != plain()[-1]


def test_configure_model_and_no_optimizer(trainer):
    class Late(Network):
        def configure_model(self):
            if not hasattr(self, "extra"):
                self.extra = nn.Linear(2, 2)

    class Nothing(Network):
        def configure_optimizers(self):
            return None

    loader = DataLoader(spread_samples(48), batch_size=12)
    trainer().fit(Late(), loader)
    with pytest.raises(UncoveredError, match="configure_optimizers"):
        trainer().fit(Nothing(), loader)
