"""What is covered is accepted and trains."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from tests.claims.trainings import CLASSES, FEATURES, HIDDEN, Network
from tests.layers.fitting import fit, network


def everything(self, batch, batch_idx):
    """Uses every kind of call that a training_step may make."""
    x, y = batch
    h = self.hidden(x)
    h = torch.cat([h[:, :8], h[:, 8:]], dim=1).reshape(-1, 4, 4).transpose(1, 2).flatten(1)
    h = F.relu(h, inplace=True) + h.detach() * 0.5
    h = h * (h > 0.01) - torch.zeros_like(h)
    h = F.linear(h, self.square.weight) / 2.0
    assert not torch.zeros_like(self.square.weight).any() and self.square.weight.numel() == HIDDEN**2
    parts = h.new_zeros(len(h), HIDDEN)
    parts[:, :4] = h[:, :4]
    logits = self.output(torch.stack([h, parts]).unbind(0)[0])
    loss = F.cross_entropy(logits, y)
    auxiliary = self.criterion(self.output(F.relu(h)), y)
    with torch.no_grad():
        x = x / x.abs().max(1, keepdim=True).values + self.levels[y].unsqueeze(1)
        accuracy = (logits.argmax(1) == y).float().mean()
        assert accuracy.item() <= 1 and not torch.isnan(loss)
    self.log("accuracy", (logits.argmax(1) == y).float().mean(), prog_bar=True, on_step=True, on_epoch=True)
    self.log("loss", loss, sync_dist=True)
    self.log_dict({"auxiliary": auxiliary, "n": float(len(x))}, on_epoch=True, on_step=False)
    self.log("detached", 1.0 - torch.stack([loss.detach(), accuracy]).mean() * 2)
    total = 0
    total += 0.5 * loss
    total += sum([auxiliary, loss / 3, -0.1 * loss.float()])
    return {"loss": total, "seen": len(x)}


class Everything(Network):
    training_step = everything

    def __init__(self):
        super().__init__()
        self.square = nn.Linear(HIDDEN, HIDDEN)
        self.tied = nn.Linear(HIDDEN, HIDDEN)
        self.tied.weight = self.square.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.criterion = nn.CrossEntropyLoss()
        self.register_buffer("levels", torch.zeros(12))
        self.rectify = nn.ReLU(inplace=True)
        with torch.no_grad():
            self.square.weight.copy_(torch.eye(HIDDEN))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9, foreach=True)


def test_what_is_covered_is_accepted_and_trains():
    module = Everything()
    unused, frozen = module.unused.weight.clone(), module.frozen.weight.clone()
    outcome = fit(lambda: module)
    assert len(set(outcome.weights)) == 3
    assert {"accuracy", "accuracy_step", "accuracy_epoch", "loss", "auxiliary", "n"} <= set(outcome.logged)
    assert torch.equal(module.unused.weight, unused) and torch.equal(module.frozen.weight, frozen)
    assert module.tied.weight is module.square.weight


STEPS = {
    "view": lambda h: h.view(6, 2, -1),
    "reshape": lambda h: h.t().reshape(-1),
    "flatten": lambda h: h.t().flatten(),
    "unflatten": lambda h: h.unflatten(1, (4, 4)),
    "view_as": lambda h: h.view_as(h) + h.reshape_as(h),
    "permute": lambda h: h.permute(1, 0).contiguous(),
    "transposes": lambda h: h.t() + h.T + h.mT + h.transpose(0, 1) + h.swapaxes(0, 1) + h.movedim(0, 1),
    "squeeze": lambda h: h.unsqueeze(1).squeeze(1) + h.unsqueeze(0).squeeze(),
    "clone": lambda h: h.clone() + h.positive(),
    "casts": lambda h: h.bfloat16().float() + h.half().to(torch.float32) + h.to(torch.float64).float(),
    "slices": lambda h: h[:, None, ..., 3] + h.narrow(1, 0, 10).select(1, 2).unsqueeze(1),
    "splits": lambda h: h.chunk(4, 1)[1] + h.split(4, 1)[2] + h.split([4, 12], 1)[0],
    "unbind": lambda h: torch.stack(h.unbind(1), dim=1),
    "joins": lambda h: torch.cat([h, torch.hstack([h[:, :8], h[:, 8:]]), torch.vstack([h[:6], h[6:]])]),
    "arithmetic": lambda h: -(1.0 - h * 2.0) / (h * h + 3.0) - torch.sub(h, 1) + h / (1.0 + h * h),
    "in place": lambda h: h.clone().mul_(2.0).add_(h).sub_(1.0).div_(3.0).neg_(),
    "ravel": lambda h: h.ravel(),
    "choices": lambda h: torch.where(h > 0, h, -2.0 * h) + h.masked_fill(h > 0.1, 0.0) + h.where(h < 0, 0.5),
    "part without gradient": lambda h: h * h.detach() + h.data,
    "keywords": lambda h: F.relu(input=F.linear(input=h, weight=torch.eye(HIDDEN), bias=None)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_covered_call_has_a_covered_backward_pass(name):
    """What the list of calls lets pass, the list of the graph's steps lets pass as well."""

    def training_step(self, batch, batch_idx):
        return STEPS[name](self.hidden(batch[0])).mean()

    assert len(set(fit(network(training_step)).weights)) == 3


def test_a_model_of_plain_layers_is_accepted_without_changes():
    class Plain(Network):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Unflatten(1, (3, 4)), nn.Identity(), nn.Flatten(), nn.Linear(FEATURES, 8), nn.ReLU(inplace=True)
            )
            self.head = nn.Linear(8, CLASSES, bias=False)

        def forward(self, x):
            return self.head(self.layers(x))

    outcome = fit(Plain)
    assert len(set(outcome.weights)) == 3


def test_evaluation_runs_what_training_refuses():
    class Evaluating(Network):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            self.log("sum", F.cross_entropy(logits, y, reduction="sum"), reduce_fx="sum")
            self.log("smooth", F.cross_entropy(logits, y, label_smoothing=0.1))
            self.log("confidence", logits.softmax(1).max(1).values.double().mean())
            self.log("norm", logits.norm(dim=1).mean(0))

    outcome = fit(Evaluating, validation=9)
    assert {"sum", "smooth", "confidence", "norm"} <= set(outcome.logged)


def test_only_the_lightningmodule_of_a_fit_is_changed():
    assert isinstance(Network(), LightningModule) and type(Network().hidden) is nn.Linear
