"""Modules without a contract are refused by their paths, before anything runs."""

import pytest
from torch import nn

from det_lightning.errors import UncoveredError
from tests.claims.trainings import Network
from tests.layers.fitting import fit


class Nested(Network):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.encoder = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2), layer)})


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(1, 1, 1),
        nn.BatchNorm1d(4),
        nn.LayerNorm(4),
        nn.AlphaDropout(0.5),
        nn.Embedding(3, 3),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(2, 2),
        nn.Sigmoid(),
        nn.LazyLinear(3),
        nn.CosineEmbeddingLoss(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_module_without_a_contract_is_refused_by_its_path(layer):
    module = Nested(layer)
    with pytest.raises(UncoveredError) as refusal:
        fit(lambda: module)
    message = str(refusal.value)
    assert f"  encoder.blocks.1: {type(layer).__name__}\n" in message
    assert "encoder.blocks.0" not in message
    assert "CrossEntropyLoss, Dropout" in message and 'strategy="ddp"' in message
    assert type(module.encoder["blocks"][0]) is nn.Linear, "the model is to be as it was"


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4)], ids=lambda layer: type(layer).__name__)
def test_C49_statistics_over_a_batch_are_refused_by_the_modules_path(layer):
    with pytest.raises(UncoveredError, match=rf"encoder\.blocks\.1: {type(layer).__name__}"):
        fit(lambda: Nested(layer))


def test_all_modules_without_a_contract_are_named_at_once():
    module = Nested(nn.Sequential(nn.Tanh(), nn.Linear(2, 2), nn.GELU()))
    with pytest.raises(UncoveredError, match=r"blocks\.1\.0: Tanh\n.*blocks\.1\.2: GELU"):
        fit(lambda: module)


@pytest.mark.parametrize(
    ("layer", "hint"),
    [
        (nn.Embedding(3, 3), r"F\.one_hot\(index, len\(table\)\)"),
        (nn.BatchNorm1d(4), "statistics over the samples of a micro-batch"),
        (nn.LazyLinear(3), "give its sizes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_says_what_to_write_instead(layer, hint):
    with pytest.raises(UncoveredError, match=hint):
        fit(lambda: Nested(layer))
    with pytest.raises(UncoveredError) as other:
        fit(lambda: Nested(nn.Tanh()))
    assert "table" not in str(other.value) and "statistics" not in str(other.value)
