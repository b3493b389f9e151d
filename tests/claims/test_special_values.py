"""The promise holds where float arithmetic is at its worst: NaN, infinities, subnormals, huge and cancelling values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.claims.test_world_size import assert_same_training, trained
from tests.claims.trainings import Network, Run, Split, spread_samples

NAN_BITS = 0x7FC00000


def one_nan(count: int) -> TensorDataset:
    """A NaN in the last sample of the second step."""
    x, y = spread_samples(count).tensors
    x[47, 3] = float("nan")
    return TensorDataset(x, y)


def both_infinities(count: int) -> TensorDataset:
    """Two samples that meet in one sum of a gradient with opposite infinities."""
    x, y = spread_samples(count).tensors
    x[2, 3], x[21, 3] = float("inf"), float("-inf")
    return TensorDataset(x, y)


def subnormal(count: int) -> TensorDataset:
    """Features so small that products with them, and gradients made of them, are subnormal or vanish."""
    x, y = spread_samples(count).tensors
    return TensorDataset(torch.ldexp(x, torch.tensor(-136)), y)


def huge(count: int) -> TensorDataset:
    """Features up to the largest float: their sums overflow."""
    x, y = spread_samples(count).tensors
    return TensorDataset((x * 2.0**120).clamp(-3.4e38, 3.4e38), y)


def cancelling(count: int) -> TensorDataset:
    """Twins of opposite sign and huge size, far apart in the order, beside ordinary samples of the same class."""
    x, y = spread_samples(count).tensors
    half = count // 2
    x[half:] = -x[:half] * 2.0**60
    x[:half] *= 2.0**60
    x[::7] = spread_samples(count, seed=8).tensors[0][::7]
    return TensorDataset(x, y[torch.arange(count) % half])


class NanWeight(Network):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.hidden.weight[0, 0] = float("nan")


def last_words(outcome) -> np.ndarray:
    return np.frombuffer(outcome.weights[-1], dtype=np.uint32)


@pytest.mark.parametrize("data", [one_nan, both_infinities, subnormal, huge, cancelling])
def test_special_values_in_the_data_give_the_same_bytes_at_every_split(data):
    run = Run(data=data, steps=4)
    expected = trained(run)
    for split in (Split(2, 4, 3), Split(3, 8, 1)):
        assert_same_training(trained(replace(run, split=split)), expected)


def test_a_nan_spreads_as_the_one_canonical_nan():
    before, after = (trained(Run(data=one_nan, steps=steps)) for steps in (1, 2))
    assert not np.isnan(last_words(before).view(np.float32)).any()
    words = last_words(after)
    assert set(words[np.isnan(words.view(np.float32))]) == {NAN_BITS}


def test_a_nan_in_the_weights_gives_the_same_bytes_at_every_split():
    run = Run(build=NanWeight, steps=3)
    expected = trained(run)
    assert set(last_words(expected)[np.isnan(last_words(expected).view(np.float32))]) == {NAN_BITS}
    assert_same_training(trained(replace(run, split=Split(3, 4, 2))), expected)


def test_subnormal_gradients_are_not_flushed():
    """The first layer's weights are zero and see subnormal features only: they move, and by subnormal amounts."""
    outcome = trained(Run(data=subnormal, build=ZeroFirst, steps=2, trainer={"gradient_clip_val": None}))
    weights = np.frombuffer(outcome.weights[-1], dtype=np.float32)[16 : 16 + 12 * 16]
    assert np.count_nonzero(weights) > 50
    assert np.abs(weights).max() < 2.0**-126


class ZeroFirst(Network):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.hidden.weight.zero_()


class OppositeLosses(Network):
    """Two infinite means, one taken from the other: processors differ in the sign of that NaN."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        output, target = self(x), torch.nn.functional.one_hot(y, self.output.out_features).to(x.dtype)
        loss = torch.nn.functional.mse_loss(output, target) - torch.nn.functional.mse_loss(output, 2.0 * target)
        self.log("loss", loss, sync_dist=True)
        return loss


def overflowing(count: int) -> TensorDataset:
    x, y = spread_samples(count).tensors
    x[5::24, 3] = 1e38
    return TensorDataset(x, y)


def test_a_loss_that_is_not_a_number_has_the_bits_of_the_one_nan():
    run = Run(build=OppositeLosses, data=overflowing, steps=2, trainer={"gradient_clip_val": None})
    for split in (Split(1, 24, 1), Split(2, 4, 3)):
        losses = trained(replace(run, split=split)).losses
        assert [int.from_bytes(loss, "little") for loss in losses] == [NAN_BITS] * 2
