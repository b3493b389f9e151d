"""Every optimizer in every precision: one training, however the global batch is cut. Cases C36, C37, C51, C54, C62."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch

from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import on_ranks
from tests.claims.test_world_size import assert_same_training
from tests.claims.trainings import Network, Outcome, Run, Split, train, train_each

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed"]


def muon_and_adam(module):
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.05, adjust_lr_fn="match_rms_adamw")


def sgd(module):
    return torch.optim.SGD(
        [{"params": module.hidden.parameters()}, {"params": module.output.parameters(), "lr": 0.5, "weight_decay": 0.0}],
        lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01,
    )  # fmt: skip


OPTIMIZERS = {
    "sgd": sgd,
    "sgd maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5, dampening=0.1, maximize=True),
    "adam amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.02, amsgrad=True, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1),
    "muon": muon_and_adam,
    "rmsprop as it is": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
}


class Optimized(Network):
    """An optimizer by name, a cosine schedule, and the norm of the gradients logged."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", self.trainer.strategy.gradient_norm()) if hasattr(
            self.trainer.strategy, "gradient_norm"
        ) else None

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.name](self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Build:
    def __init__(self, name: str):
        self.name = name

    def __call__(self):
        return Optimized(self.name)


CASES = [*itertools.product(OPTIMIZERS, PRECISIONS)]
SPLITS = [Split(w, 1, a) for w in (1, 2, 3, 4) for a in (1, 2, 3)]
FEW = [Split(1, 1, 1), Split(1, 1, 3), Split(2, 1, 2)]


def run_of(name: str, precision: str, split: Split, **options) -> Run:
    clipping = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value" if name == "sgd" else "norm"}
    return Run(
        split=split,
        steps=4,
        samples=40,
        build=Build(name),
        trainer={"precision": precision, **clipping},
        **{"options": {"global_batch": 12, "stock_optimizers": "as it is" in name}, **options},
    )


@cache
def outcomes(split: Split) -> dict[tuple[str, str], Outcome]:
    runs = [run_of(*case, split) for case in CASES]
    ports = [free_port() for _ in runs[1:]]
    return dict(zip(CASES, on_ranks(split.world_size, train_each, runs, ports)[0], strict=True))


@pytest.mark.parametrize("split", FEW[1:], ids=str)
def test_C36_C37_C51_C54_every_optimizer_and_precision_gives_one_training(split):
    for case in CASES:
        assert_same_training(outcomes(split)[case], outcomes(FEW[0])[case])
        assert outcomes(split)[case].logged["norm"] == outcomes(FEW[0])[case].logged["norm"]
        assert outcomes(split)[case].rates == outcomes(FEW[0])[case].rates


@pytest.mark.slow
@pytest.mark.parametrize("split", [split for split in SPLITS if split not in FEW], ids=str)
def test_every_world_size_and_accumulation_gives_one_training(split):
    for case in CASES:
        assert_same_training(outcomes(split)[case], outcomes(FEW[0])[case])


def test_the_cases_are_unlike_each_other_and_train():
    last = {case: outcome.weights[-1] for case, outcome in outcomes(FEW[0]).items()}
    assert len(set(last.values())) == len(CASES)
    for (_, precision), outcome in outcomes(FEW[0]).items():
        assert len(set(outcome.weights)) == 5
        kind = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert len(outcome.weights[0]) == kind.itemsize * sum(p.numel() for p in Network().parameters())


@pytest.mark.parametrize(
    "case", [("sgd", "bf16-mixed"), ("adamw", "32-true"), ("adamw", "bf16-true"), ("muon", "32-true")]
)
def test_it_is_the_stock_training_up_to_rounding(case):
    ours = outcomes(FEW[0])[case]
    options = run_of(*case, Split(1, 12, 1)).trainer | {"use_distributed_sampler": False}
    stock = Run(split=Split(1, 12, 1), strategy="ddp", steps=4, samples=40, build=Build(case[0]), trainer=options)
    theirs = train(0, 1, free_port(), stock)
    kind = torch.bfloat16 if case[1] == "bf16-true" else torch.float32
    a, b, start = (
        torch.frombuffer(bytearray(w), dtype=kind).float().numpy()
        for w in (ours.weights[-1], theirs.weights[-1], ours.weights[0])
    )
    share = 1e-3 if case == ("adamw", "32-true") else 0.2
    assert np.abs(a - b).mean() < share * np.abs(b - start).mean()


def test_C54_stock_bfloat16_fails_the_same_check():
    def stock(split: Split) -> Run:
        return Run(
            split=split, strategy="ddp", steps=4, samples=48, build=Build("adamw"), trainer={"precision": "bf16-true"}
        )

    whole, halves = (train(0, 1, free_port(), stock(split)) for split in (Split(1, 12, 1), Split(1, 4, 3)))
    assert whole.weights[0] == halves.weights[0] and whole.weights[-1] != halves.weights[-1]
