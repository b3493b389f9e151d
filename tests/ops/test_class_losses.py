"""Losses over classes against their written sequences on Python numbers, and against the stock functions' values."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from det_lightning.arithmetic import elementary
from det_lightning.errors import InputError
from det_lightning.ops.class_losses import class_items, kl_items, log_softmax, probability_items
from det_lightning.ops.loss import cross_entropy_items
from tests.ops.exact_oracle import INF, NAN, NEGATIVE_INF, rounded, wide_values
from tests.same_bits import assert_same_bits

F32 = np.float32
C = 5
LOGITS = torch.cat([wide_values(1, 7, C, spread=1), torch.tensor([[0.0] * C, [88.0, -88.0, 0.0, 1.0, 2.0]])])
TARGET = torch.tensor([0, 4, 2, -100, 1, 3, 3, 0, 1])
WEIGHTS = torch.tensor([0.3, 1.7, 0.01, 1.0, 123.456])
UPSTREAM = wide_values(2, len(TARGET), spread=1)


def of_bits(pattern: int):
    return np.uint32(pattern).view(F32)


def exact_sum(values):
    return of_bits(rounded([Fraction(float(v)) for v in values], torch.float32))


def exact_dot(a, b):
    return of_bits(rounded([Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)], torch.float32))


def function(name, x):
    return of_bits(getattr(elementary, name)(int(F32(x).view(np.uint32))))


def parts(row):
    d = [F32(x - row.max()) for x in row]
    e = [function("exp", v) for v in d]
    s = exact_sum(e)
    u = [F32(function("log", s) - v) for v in d]
    return u, [F32(v / s) for v in e]


@pytest.mark.parametrize(("weighted", "smoothing"), [*itertools.product((False, True), (0.0, 0.1))])
def test_class_indices_follow_the_written_sequence(weighted, smoothing):
    w = WEIGHTS.numpy() if weighted else np.ones(C, F32)
    keep, share = F32(1.0 - smoothing), F32(smoothing / C)
    losses, gradients = [], []
    for row, t, g in zip(LOGITS.numpy(), TARGET.tolist(), UPSTREAM.numpy(), strict=True):
        if t == -100:
            losses.append(F32(0))
            gradients.append([F32(0)] * C)
            continue
        u, p = parts(row)
        loss = F32(u[t] * w[t])
        f = [F32(w[t] * F32(p[j] - F32(j == t))) for j in range(C)]
        if smoothing:
            spread = exact_dot(u, w) if weighted else exact_sum(u)
            loss = F32(F32(keep * loss) + F32(share * spread))
            total = exact_sum(w)
            f = [F32(F32(keep * f[j]) + F32(share * F32(F32(p[j] * total) - w[j]))) for j in range(C)]
        losses.append(loss)
        gradients.append([F32(g * v) for v in f])
    logits = LOGITS.clone().requires_grad_()
    options = {"weight": WEIGHTS if weighted else None, "label_smoothing": smoothing}
    items = class_items(logits, TARGET, **options)
    items.backward(UPSTREAM)
    assert_same_bits(items.detach(), torch.from_numpy(np.array(losses)))
    assert_same_bits(logits.grad, torch.from_numpy(np.array(gradients, F32)))
    options["weight"] = WEIGHTS.double() if weighted else None
    stock = F.cross_entropy(LOGITS.double(), TARGET, reduction="none", **options)
    assert torch.allclose(items.detach().double(), stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weighted", "smoothing"), [*itertools.product((False, True), (0.0, 0.1))])
def test_no_rows_are_no_items(weighted, smoothing):
    """A micro-batch whose sequences have no token that counts."""
    logits, options = torch.zeros(0, C, requires_grad=True), {"weight": WEIGHTS if weighted else None}
    for items in (
        class_items(logits, TARGET[:0], label_smoothing=smoothing, **options),
        probability_items(logits, torch.zeros(0, C), label_smoothing=smoothing, **options),
        class_items(log_softmax(logits, 1), TARGET[:0], log_probabilities=True, **options),
    ):
        assert items.shape == (0,)
        (gradient,) = torch.autograd.grad(items.sum(), logits)
        assert gradient.shape == (0, C)


def test_without_weights_and_smoothing_it_is_the_plain_cross_entropy():
    results = []
    for items_of in (class_items, cross_entropy_items):
        logits = LOGITS.clone().requires_grad_()
        items = items_of(logits, TARGET, ignore_index=-100)
        items.backward(UPSTREAM)
        results.append((items.detach(), logits.grad))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_probabilities_follow_the_written_sequence(smoothing):
    probabilities = wide_values(3, *LOGITS.shape, spread=1).abs()
    keep, share = F32(1.0 - smoothing), F32(smoothing / C)
    losses, gradients = [], []
    for row, y, g in zip(LOGITS.numpy(), probabilities.numpy(), UPSTREAM.numpy(), strict=True):
        y = [F32(F32(v * keep) + share) for v in y] if smoothing else y
        r = [F32(a * b) for a, b in zip(y, WEIGHTS.numpy(), strict=True)]
        u, p = parts(row)
        losses.append(exact_dot(u, r))
        total = exact_sum(r)
        gradients.append([F32(g * F32(F32(p[j] * total) - r[j])) for j in range(C)])
    logits = LOGITS.clone().requires_grad_()
    items = probability_items(logits, probabilities, weight=WEIGHTS, label_smoothing=smoothing)
    items.backward(UPSTREAM)
    assert_same_bits(items.detach(), torch.from_numpy(np.array(losses)))
    assert_same_bits(logits.grad, torch.from_numpy(np.array(gradients, F32)))


def test_log_softmax_then_nll_and_kl_div():
    x = LOGITS.clone().requires_grad_()
    y = log_softmax(x, 1)
    upstream = wide_values(4, *LOGITS.shape, spread=1)
    y.backward(upstream)
    for row, out, g, got in zip(LOGITS.numpy(), y.detach().numpy(), upstream.numpy(), x.grad.numpy(), strict=True):
        u, p = parts(row)
        assert_same_bits(torch.from_numpy(out), torch.from_numpy(F32(0) - np.array(u)))
        total = exact_sum(g)
        want = np.array([F32(g[j] - F32(p[j] * total)) for j in range(C)])
        assert_same_bits(torch.from_numpy(got), torch.from_numpy(want))
    assert_same_bits(log_softmax(LOGITS.t().contiguous(), 0), y.detach().t())
    values = y.detach().clone().requires_grad_()
    items = class_items(values, TARGET, weight=WEIGHTS, log_probabilities=True)
    items.backward(UPSTREAM)
    kept = TARGET >= 0
    index = TARGET.clamp(min=0)
    w = WEIGHTS[index]
    want = torch.where(kept, -(values.detach().gather(1, index.unsqueeze(1)).squeeze(1) * w), torch.tensor(0.0))
    assert_same_bits(items.detach(), want)
    derivative = torch.zeros_like(values).scatter_(1, index.unsqueeze(1), -w.unsqueeze(1))
    assert_same_bits(values.grad, torch.where(kept.unsqueeze(1), UPSTREAM.unsqueeze(1) * derivative, 0.0))


def kl_item(x, y, log_target):
    """(term, derivative) of the Kullback-Leibler divergence by the written sequence."""
    if log_target:
        p = function("exp", y)
        return F32(p * F32(y - x)), -p
    return F32((F32(y * function("log", y)) if y else F32(0)) - F32(y * x)), -y


@pytest.mark.parametrize("log_target", [False, True])
@np.errstate(invalid="ignore")
def test_kl_div_follows_the_written_sequence_and_zero_probabilities_count_nothing(log_target):
    x = torch.log_softmax(LOGITS, 1).requires_grad_()
    target = torch.softmax(wide_values(5, *LOGITS.shape, spread=1), 1)
    target[0, 0] = 0.0
    target = target.log() if log_target else target
    items = kl_items(x, target, log_target=log_target)
    upstream = wide_values(6, *LOGITS.shape, spread=1)
    items.backward(upstream)
    expected = [
        kl_item(*each, log_target) for each in zip(x.detach().flatten().numpy(), target.flatten().numpy(), strict=True)
    ]
    want, derivative = (torch.from_numpy(np.array(part, F32)).view_as(x) for part in zip(*expected, strict=True))
    assert_same_bits(items.detach(), want)
    assert_same_bits(x.grad, upstream * derivative)
    assert items[0, 0].view(torch.int32) == 0x7FC00000 if log_target else items[0, 0] == 0
    stock = F.kl_div(x.detach().double(), target.double(), reduction="none", log_target=log_target)
    assert torch.allclose(items.detach().double(), stock, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_special_values_are_canonical():
    logits = torch.tensor([[NAN, 0.0], [INF, 0.0], [NEGATIVE_INF, 0.0], [INF, INF]], requires_grad=True)
    for options in ({}, {"weight": torch.ones(2)}, {"label_smoothing": 0.5}):
        items = class_items(logits, torch.tensor([0, 0, 0, 1]), **options)
        (gradient,) = torch.autograd.grad(items.sum(), logits)
        assert items.isnan().tolist() == [True, True, False, True]
        for values in (items.detach(), gradient):
            assert set(values[values.isnan()].view(torch.int32).tolist()) == {0x7FC00000}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: class_items(LOGITS, TARGET, weight=-WEIGHTS), "not negative"),
        (lambda: class_items(LOGITS, TARGET, weight=WEIGHTS[:3]), r"class weights are float32 \[5\]"),
        (lambda: class_items(LOGITS, TARGET + 3), r"outside \[0, 5\)"),
        (lambda: class_items(LOGITS, TARGET.float()), "class indices are int64"),
        (lambda: class_items(LOGITS, TARGET, label_smoothing=2.0), "label_smoothing"),
        (lambda: class_items(LOGITS.double(), TARGET), "float32 rows"),
        (lambda: probability_items(LOGITS, LOGITS[:1]), "class probabilities are float32"),
        (lambda: kl_items(LOGITS, LOGITS[:1]), "one shape"),
        (lambda: log_softmax(torch.zeros(3, 0), 1), "at least one element"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
