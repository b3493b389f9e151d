"""Metrics of torchmetrics that add floats have the same bytes at every split, in training and in evaluation."""

import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torchmetrics import (
    Accuracy,
    CalibrationError,
    CatMetric,
    CosineSimilarity,
    KLDivergence,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
    SumMetric,
)
from torchmetrics.wrappers import Running

from det_lightning.strategies.exact_metrics import ExactStates, make_metrics_exact, make_metrics_stock
from tests.claims.processes import Failed, on_ranks
from tests.claims.trainings import CLASSES, Network, Run, Split, train

SPLITS = [Split(1, 12, 1), Split(1, 3, 4), Split(2, 3, 2), Split(3, 4, 1)]
EVALUATED = 29  # ranks with unlike numbers of samples, and one without any at the end


class Measured(Network):
    def __init__(self):
        super().__init__()
        self.of_training = MeanMetric()
        self.mean, self.total, self.accuracy = MeanMetric(), SumMetric(), Accuracy("multiclass", num_classes=CLASSES)
        self.both = MetricCollection({"mse": MeanSquaredError(num_outputs=CLASSES), "r2": R2Score()})
        self.divergence = KLDivergence()
        self.kept = MetricCollection(
            {
                "calibration": CalibrationError("multiclass", num_classes=CLASSES, n_bins=3),
                "spearman": SpearmanCorrCoef(),
                "cosine": CosineSimilarity(reduction="mean"),
            }
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.of_training.update(F.cross_entropy(logits, y, reduction="none").detach())
        self.log("training loss", self.of_training, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        target = F.one_hot(y, CLASSES).float()
        self.log("mean", self.mean(F.cross_entropy(logits, y, reduction="none"), weight=1.0 + y) * 1.0)
        self.log("all of it", self.mean)
        self.total.update(logits.exp().sum(1))
        self.log("total", self.total)
        self.log("accuracy", self.accuracy(logits, y))
        self.both["mse"].update(logits, target)
        self.both["r2"].update(logits[:, 0], x[:, 0])
        self.divergence.update(logits.softmax(1), (2.0 * logits).softmax(1))
        self.log("divergence", self.divergence)
        self.kept["calibration"].update(logits.softmax(1), y)
        self.kept["spearman"].update(logits[:, 1], x[:, 2])
        self.kept["cosine"].update(logits, target)

    def on_validation_epoch_end(self):
        values = self.both.compute()
        self.log("mse", values["mse"].sum())
        self.log("r2", values["r2"])
        self.both.reset()
        self.log_dict(self.kept.compute())
        self.kept.reset()


class Keep(Callback):
    def __init__(self):
        self.found = []

    def on_validation_end(self, trainer, pl_module):
        names = ("all of it", "total", "divergence", "mse", "r2", "calibration", "spearman", "cosine")
        self.found.append({name: float(trainer.callback_metrics[name]).hex() for name in names})

    def on_train_epoch_end(self, trainer, pl_module):
        self.found.append(float(trainer.callback_metrics["training loss"]).hex())


def measure(rank: int, world_size: int, port: int, run: Run) -> tuple[list, list[str]]:
    """(values of every epoch, the classes of metrics afterwards)."""
    keep = Keep()
    modules = []

    def build():
        modules.append(run.build())
        return modules[-1]

    train(rank, world_size, port, replace(run, build=build, callbacks=(keep,)))
    return keep.found, [type(each).__name__ for each in modules[0].modules() if hasattr(each, "_update_count")]


def run_of(split: Split, **options) -> Run:
    return Run(split=split, steps=8, samples=40, build=Measured, validation=EVALUATED, **options)


@cache
def values(split: Split, strategy: str = "det") -> list:
    ranks = on_ranks(split.world_size, measure, run_of(split, strategy=strategy))
    assert all(found == ranks[0] for found in ranks)
    assert not [name for name in ranks[0][1] if name.startswith("Exact")], "metrics are the user's own afterwards"
    return ranks[0][0]


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_values_of_metrics_do_not_depend_on_the_split(split):
    assert values(split) == values(SPLITS[0])
    assert len(values(split)) == 4 and len({str(each) for each in values(split)}) == 4


def test_stock_metrics_fail_the_same_check():
    """Without ranks, which would repeat samples: micro-batches alone move the bits of a mean that is added up in floats."""
    assert values(Split(1, 12, 1), "ddp") != values(Split(1, 3, 4), "ddp")


def test_values_are_the_stock_metrics_up_to_rounding_and_the_metric_is_stock_again_afterwards():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(23, 4, generator=generator), torch.randn(23, 4, generator=generator)
    stock, ours = MeanSquaredError(), torch.nn.ModuleList([MeanSquaredError()])
    make_metrics_exact(ours)
    make_metrics_exact(ours)
    assert isinstance(ours[0], ExactStates)
    for metric in (stock, ours[0]):
        assert torch.isclose(metric(x[:9], y[:9]), F.mse_loss(x[:9], y[:9]))
        metric.update(x[9:], y[9:])
    exact = float((x.double() - y.double()).square().mean())
    assert abs(float(ours[0].compute()) - exact) <= abs(float(stock.compute()) - exact) + 2e-8
    ours[0].reset()
    ours[0].update(x, torch.full_like(y, float("nan")))
    assert torch.isnan(ours[0].compute())
    make_metrics_stock(ours)
    assert type(ours[0]) is MeanSquaredError and set(ours[0]._defaults) == {"sum_squared_error", "total"}
    ours[0].reset()
    assert torch.equal(ours[0](x, y), stock(x, y))


@pytest.mark.parametrize(
    "metric", [PearsonCorrCoef(), Running(MeanMetric(), window=3), MeanMetric().set_dtype(torch.float64)]
)
def test_a_metric_that_adds_floats_in_a_way_of_its_own_is_warned_of_by_name(metric):
    module = torch.nn.ModuleDict({"correlation": metric, "accuracy": Accuracy("multiclass", num_classes=3)})
    with pytest.warns(UserWarning, match="the metric correlation.* adds floats in its states"):
        make_metrics_exact(module)
    assert not any(isinstance(each, ExactStates) for each in module.modules())


def test_metrics_of_integers_are_left_alone():
    module = torch.nn.ModuleDict({"accuracy": Accuracy("multiclass", num_classes=3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_metrics_exact(module)
    assert not isinstance(module["accuracy"], ExactStates)


def test_samples_that_a_metric_keeps_stay_in_the_order_in_which_they_came():
    module = torch.nn.ModuleDict({"all": CatMetric(), "cosine": CosineSimilarity(reduction="none")})
    make_metrics_exact(module)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    module["all"].update(x[:, 0])
    module["cosine"].update(x, x[[1, 2, 3, 4, 0]])
    before = [each.clone() for each in module["cosine"].preds]
    module["cosine"].compute()
    assert torch.equal(module["all"].compute(), x[:, 0])
    assert all(map(torch.equal, module["cosine"].preds, before))
    make_metrics_stock(module)
    assert type(module["cosine"]) is CosineSimilarity and torch.equal(module["cosine"].preds[0], x)


class InTheLoss(Measured):
    def training_step(self, batch, batch_idx):
        x, y = batch
        value = self.of_training(F.cross_entropy(self(x), y, reduction="none").detach())
        self.log("of the batch", value)
        return (F.cross_entropy(self(x), y, reduction="none") * value).mean()


def test_the_value_of_a_metric_may_not_enter_the_loss():
    with pytest.raises(Failed, match="it depends on how the global batch is cut into micro-batches") as failed:
        on_ranks(1, train, replace(run_of(SPLITS[0]), build=InTheLoss))
    assert failed.value.kind == "UncoveredError"
