"""SGD against its sequence written out in NumPy float32, byte for byte."""

import itertools

import numpy as np
import pytest
import torch

from det_lightning.errors import UncoveredError
from det_lightning.optim.stepping import check_optimizer, step_optimizer
from tests.ops.exact_oracle import INF, NAN, any_patterns, wide_values
from tests.same_bits import assert_same_bits

F32 = np.float32
OPTIONS = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay, "maximize": maximize}
    for momentum, dampening, nesterov, decay, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.01), (False, True)
    )
    if not nesterov or (momentum and not dampening)
]


@np.errstate(all="ignore")
def reference(parameter, gradients, *, lr, momentum, dampening, nesterov, weight_decay, maximize):
    """The sequence of the module's head, one line an operation."""
    p, b = parameter.copy(), None
    for gradient in gradients:
        g = -gradient if maximize else gradient
        if weight_decay:
            g = g + p * F32(weight_decay)
        if momentum:
            b = g if b is None else b * F32(momentum) + (g * F32(1.0 - dampening) if dampening else g)
            g = g + b * F32(momentum) if nesterov else b
        p = p - g * F32(lr)
    return p, b


def stepped(parameter: torch.Tensor, gradients: list[torch.Tensor], **options):
    parameter = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.SGD([parameter], **options)
    check_optimizer(optimizer)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step_optimizer(optimizer)
        assert_same_bits(parameter.grad, gradient)
    return parameter.detach(), optimizer.state[parameter].get("momentum_buffer")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_step_is_the_written_sequence(options):
    parameter, gradients = (
        wide_values(1, 501, spread=3.0),
        [wide_values(2 + step, 501, spread=3.0) for step in range(4)],
    )
    ours, buffer = stepped(parameter, gradients, lr=0.1, **options)
    expected, b = reference(parameter.numpy(), [g.numpy() for g in gradients], lr=0.1, **options)
    assert_same_bits(ours, torch.from_numpy(expected))
    assert (buffer is None) == (b is None)
    if b is not None:
        assert_same_bits(buffer, torch.from_numpy(b))


def test_the_stock_step_fails_the_same_check_where_it_fuses():
    """On this processor torch contracts alpha= into a fused multiply-add; elsewhere it may not."""
    parameter, gradient = wide_values(9, 4001, spread=1.0), wide_values(10, 4001, spread=1.0)
    stock = torch.nn.Parameter(parameter.clone())
    stock.grad = gradient.clone()
    torch.optim.SGD([stock], lr=0.1, foreach=False).step()
    ours, _ = stepped(parameter, [gradient], lr=0.1)
    fused = torch.from_numpy((parameter.double() - gradient.double() * float(F32(0.1))).numpy().astype(F32))
    assert_same_bits(ours, parameter - gradient * F32(0.1))
    assert (fused.view(torch.int32) != ours.view(torch.int32)).any(), "the data tells one rounding from two"
    if (stock.detach().view(torch.int32) != ours.view(torch.int32)).any():
        assert (stock.detach() - fused).abs().max() <= (stock.detach() - ours).abs().max()


def test_special_values_go_through_the_same_sequence():
    parameter, gradients = any_patterns(11, 300), [any_patterns(12, 300), any_patterns(13, 300)]
    parameter[:3] = torch.tensor([NAN, INF, -INF])
    gradients[0][:3] = INF
    options = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False}
    ours, buffer = stepped(parameter, gradients, lr=0.5, **options)
    expected, b = reference(parameter.numpy(), [g.numpy() for g in gradients], lr=0.5, **options)
    for tensor, array in ((ours, expected), (buffer, b)):
        assert_same_bits(tensor, torch.from_numpy(array))
        assert set(tensor[tensor.isnan()].view(torch.int32).tolist()) == {0x7FC00000}


def test_an_element_does_not_depend_on_the_tensor_around_it():
    parameter, gradients = wide_values(14, 130), [wide_values(15, 130), wide_values(16, 130)]
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    whole, _ = stepped(parameter, gradients, **options)
    for first, last in ((0, 1), (3, 20), (64, 130)):
        part, _ = stepped(parameter[first:last], [g[first:last] for g in gradients], **options)
        assert_same_bits(part, whole[first:last])


def test_the_state_is_torchs_own_and_goes_through_a_state_dict():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(wide_values(seed, 5)) for seed in (17, 17)]
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in parameters]
    for step in range(4):
        if step == 2:
            optimizers[1] = torch.optim.SGD([parameters[1]], lr=0.3)
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = wide_values(18 + step, 5)
            step_optimizer(optimizer)
    assert_same_bits(parameters[0].detach(), parameters[1].detach())


def test_groups_have_their_own_constants_and_parameters_without_gradient_stay():
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [first, third]}, {"params": [second], "lr": 1.0}], lr=torch.tensor(0.5))
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    step_optimizer(optimizer)
    assert (first[0].item(), second[0].item(), third[0].item()) == (0.5, 0.0, 1.0)


def test_step_hooks_run_and_schedulers_are_told():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    parameter.grad = torch.ones(1)
    step_optimizer(optimizer)
    scheduler.step()
    assert seen == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adagrad(p), r"torch\.optim\.adagrad\.Adagrad"),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), "fused"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (
            lambda p: torch.optim.SGD([torch.nn.Parameter(q.detach().double()) for q in p], lr=0.1),
            r"float64 parameter of shape \(2, 3\)",
        ),
    ],
)
def test_what_has_no_sequence_is_refused_with_its_name(make, message):
    with pytest.raises(UncoveredError, match=message):
        check_optimizer(make([torch.nn.Parameter(torch.ones(2, 3))]))


def test_an_unlisted_optimizer_is_stepped_as_it_is_when_asked_for_and_says_what_is_lost():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    ours, stock = (torch.optim.Adagrad([p], lr=0.1) for p in parameters)
    lost = check_optimizer(ours, as_it_is=True)
    assert "not on CPU and CUDA" in lost and "Adagrad" in lost
    assert check_optimizer(torch.optim.SGD([parameters[0]], lr=0.1), as_it_is=True) is None
    for parameter in parameters:
        parameter.grad = torch.arange(3.0)
    step_optimizer(ours)
    stock.step()
    assert_same_bits(parameters[0].detach(), parameters[1].detach())
    with pytest.raises(UncoveredError, match="closure many times"):
        check_optimizer(torch.optim.LBFGS(parameters), as_it_is=True)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_bfloat16_parameters_are_stepped_in_float32_and_rounded_once(kind):
    start, gradients = wide_values(1, 40, spread=1).bfloat16(), [wide_values(2 + n, 40, spread=1) for n in range(3)]
    options = {"lr": 0.1, "weight_decay": 0.1, **({"momentum": 0.9} if kind == "SGD" else {"amsgrad": True})}
    parameter = torch.nn.Parameter(start.clone())
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    check_optimizer(optimizer)
    for gradient in gradients:
        before = parameter.detach().clone()
        state = {name: value.clone() for name, value in optimizer.state[parameter].items()}
        parameter.grad = gradient.bfloat16()
        step_optimizer(optimizer)
        wide = torch.nn.Parameter(before.float())
        other = getattr(torch.optim, kind)([wide], **options)
        wide.grad = gradient.bfloat16().float()
        other.state[wide].update({n: v.float() for n, v in state.items()})
        step_optimizer(other)
        assert_same_bits(parameter.detach(), wide.detach().bfloat16())
        for name, value in optimizer.state[parameter].items():
            assert_same_bits(value, other.state[wide][name].to(value.dtype))
