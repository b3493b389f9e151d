"""A network whose training step uses parameters outside linear layers, in one way of USES at a time."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from tests.claims.trainings import CLASSES, HIDDEN, Network


class LowRank(nn.Module):
    """A parametrization of torch.nn.utils: weight + high @ low."""

    def __init__(self):
        super().__init__()
        self.high, self.low = nn.Parameter(torch.full((CLASSES, 2), 0.1)), nn.Parameter(torch.eye(HIDDEN)[:2] * 0.3)

    def forward(self, weight):
        return weight + self.high @ self.low


class Uses(Network):
    """A network with parameters of every shape that the uses below ask for; the others have no gradient."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        generator = torch.Generator().manual_seed(11)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.rand(shape, generator=generator) - 0.4)

        self.scale, self.shift, self.single = made(HIDDEN), made(HIDDEN), made()
        self.token, self.places = made(1, 1, HIDDEN), made(1, 7, HIDDEN)
        self.low, self.high, self.table = made(2, HIDDEN), made(CLASSES, 2), made(9, HIDDEN)
        self.part = made(2, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, CLASSES, bias=False).requires_grad_(False)
        with torch.no_grad():
            self.frozen.weight.copy_(torch.rand(CLASSES, HIDDEN, generator=generator) - 0.5)
        self.parametrized = nn.Linear(HIDDEN, CLASSES)
        with torch.no_grad():
            for parameter in self.parametrized.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        register_parametrization(self.parametrized, "weight", LowRank())
        self.register_buffer("index", torch.tensor([4, 4, 0]))
        self.register_buffer("mask", (torch.rand(CLASSES, HIDDEN, generator=generator) > 0.3).float())

    def classify(self, h):
        return self.output(F.relu(h))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return USES[self.name](self, x, self.hidden(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def loss(logits, y):
    return F.cross_entropy(logits, y)


def tokens(self, x, h, y):
    sequence = torch.cat([self.token.expand(len(x), -1, -1), torch.stack([h, 0.5 * h], 1)], 1) + self.places[:, 1:4]
    return loss(self.classify(sequence[:, 0] * 0.5 + sequence[:, 1] - sequence[:, 2]), y)


def table_by_a_buffer(self, x, h, y):
    shifted = h.unsqueeze(1) * self.table[self.index]
    constant = torch.arange(5, device=x.device)
    return loss(self.classify(shifted.unbind(1)[1] + self.table[constant][3]), y)


def queries(self, x, h, y):
    """Samples in the dimension 1."""
    spread = self.table[:3].unsqueeze(1).expand(-1, len(x), -1) + h.unsqueeze(0) * self.table[3:6].unsqueeze(1)
    return loss(self.classify(spread.unbind(0)[1] - spread.unbind(0)[2]), y)


def tied(self, x, h, y):
    again = F.relu(h) @ self.hidden.weight - x
    return loss(self.classify(h), y) + 0.1 * F.mse_loss(again, x)


def standardised(self, x, h, y):
    w = self.output.weight
    centred = w - w.mean(1, keepdim=True)
    return loss(F.linear(F.relu(h), centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()), y)


def pruned(self, x, h, y):
    w = self.output.weight
    return loss(F.linear(F.relu(h * self.scale.exp().detach()), w * (w.abs() > 0.1) * self.scale.exp().detach()), y)


def in_place(self, x, h, y):
    h = h * 1.0
    h += self.shift
    h.mul_(self.scale)
    return loss(self.classify(h), y)


def with_a_penalty(self, x, h, y):
    width = F.softplus(self.scale)
    return loss(self.classify(h / width), y) + 0.01 * width.log().sum() + 0.001 * self.scale.square().sum()


def two_denominators(self, x, h, y):
    gated = torch.sigmoid(self.scale) * h + self.shift
    return loss(self.classify(gated), y) + 0.05 * (gated * gated).sum() * 0.01


def checkpointed(self, x, h, y):
    width, half = torch.tanh(self.shift), torch.tensor(0.5, device=x.device)

    def region(h, scale, width):
        return F.relu(h * scale + width) * torch.sigmoid(self.scale * half) + self.shift * width

    logits = self.output(checkpoint(region, h, self.scale, width, use_reentrant=False))
    return loss(logits, y) + 0.0005 * (logits * logits).sum()  # two denominators: computed again for each


def nested(self, x, h, y):
    def inner(h):
        return h * self.scale.exp() + self.table[2]

    def outer(h):
        return self.classify(checkpoint(inner, h, use_reentrant=False) + self.shift[None])

    return loss(checkpoint(outer, h, use_reentrant=False), y)


USES = {
    "scale and shift": lambda self, x, h, y: loss(self.classify(h * self.scale + self.shift), y),
    "shift first": lambda self, x, h, y: loss(self.classify(self.shift - h), y),
    "temperature": lambda self, x, h, y: loss(self.classify(h) / self.single, y),
    "0-dim scale": lambda self, x, h, y: loss(self.classify(self.single * h + self.single), y),
    "gate": lambda self, x, h, y: loss(self.classify(torch.sigmoid(self.scale) * h), y),
    "exponential": lambda self, x, h, y: loss(self.classify(h) * self.single.exp(), y),
    "clamped": lambda self, x, h, y: loss(self.classify(h) * self.single.exp().clamp(max=1.2), y),
    "keywords": lambda self, x, h, y: loss(
        self.classify(torch.mul(input=torch.add(h, other=self.shift), other=self.scale)), y
    ),
    "queries": queries,
    "rows chosen by samples": lambda self, x, h, y: loss(
        self.classify(h + F.one_hot((x[:, 0] > 0).long(), 9).to(h.dtype) @ self.table), y
    ),
    "a mask token": lambda self, x, h, y: loss(self.classify(torch.where(h > 0, h, self.shift.expand_as(h))), y),
    "parametrized": lambda self, x, h, y: loss(self.parametrized(F.relu(h)), y),
    "prelu": lambda self, x, h, y: loss(self.output(F.relu(h) - self.single * F.relu(-h)), y),
    "tokens": tokens,
    "repeated token": lambda self, x, h, y: loss(
        self.classify(torch.cat([self.token.repeat(len(x), 1, 1), h.unsqueeze(1)], 1).view(len(x), -1)[:, :HIDDEN] + h),
        y,
    ),
    "a table by a buffer": table_by_a_buffer,
    "concatenated weight": lambda self, x, h, y: loss(F.linear(h, torch.cat([self.low, self.part, self.low[:1]])), y),
    "transposed weight": lambda self, x, h, y: loss(self.classify(h @ F.linear(self.low.t(), self.low.t())), y),
    "tied": tied,
    "low rank": lambda self, x, h, y: loss(F.linear(F.relu(h), self.frozen.weight + 2.0 * (self.high @ self.low)), y),
    "standardised": standardised,
    "masked": lambda self, x, h, y: loss(F.linear(F.relu(h), self.output.weight * self.mask, self.output.bias), y),
    "pruned": pruned,
    "in place": in_place,
    "a penalty of the same function": with_a_penalty,
    "two denominators": two_denominators,
    "checkpointed": checkpointed,
    "checkpointed twice": nested,
    "heads": lambda self, x, h, y: loss(
        self.classify((h.view(-1, 4, 4) * self.scale.view(4, 4).t() + self.shift.view(1, 4, 4)).flatten(1)), y
    ),
}


class Build:
    def __init__(self, name: str):
        self.name = name

    def __call__(self):
        return Uses(self.name)
