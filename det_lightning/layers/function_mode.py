"""The calls between modules: covered ones run as the contract says, the others are refused by the module's path.

Works on every torch function called inside `with FunctionMode(...)`. A function whose result holds no floating-point
tensor cannot move a bit of the training and passes.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from det_lightning.errors import DetError, UncoveredError
from det_lightning.layers.loss_calls import LOSS_FUNCTIONS, loss_call
from det_lightning.layers.loss_terms import STATISTIC, LossTerms
from det_lightning.ops import activation, linear, loss

# Names of functions and Tensor methods that move or copy bits, or round once (casts).
_MOVES = frozenset(
    """view reshape flatten unflatten view_as reshape_as permute transpose t swapaxes movedim squeeze unsqueeze contiguous
    clone detach to type float bfloat16 half cpu narrow select chunk split unbind cat concat concatenate stack T mT H mH
    data requires_grad_ alias ravel hstack vstack as_subclass positive tensor as_tensor from_numpy zeros ones full
    arange zeros_like ones_like full_like new_zeros new_ones new_full new_tensor scalar_tensor eye""".split()
)
# The same, where the backward pass would add floats in an order of its own: only for tensors without gradient.
_MOVES_WITHOUT_GRADIENT = frozenset(
    """expand expand_as broadcast_to gather index_select take where masked_fill masked_select roll flip getitem
    setitem max min amax amin maximum minimum clamp clip abs sign repeat tile copy fill zero sort topk one_hot""".split()
)
# IEEE operations, one rounding each; without gradient through a broadcast.
_IEEE = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div truediv itruediv true_divide neg".split()
)
_RANDOM = frozenset(
    """rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson uniform random
    exponential geometric cauchy log_normal dropout alpha_dropout feature_dropout rrelu""".split()
)
_HOOKS = frozenset("register_hook register_post_accumulate_grad_hook".split())
_INPLACE_RELU = (F.relu_, torch.relu_, Tensor.relu_)
_RELU = (F.relu, torch.relu, Tensor.relu, activation.relu)
_MEAN = (torch.mean, Tensor.mean)


class FunctionMode(TorchFunctionMode):
    """Replaces covered functions while a step of the model runs.

    Args:
        model: for the names of modules and parameters in errors.
        sink: receives the digits of parameter gradients.
        terms: records how the loss is made of means.
        strict: refuse uncovered functions; otherwise (evaluation, which moves no weight) they run as they are.
    """

    def __init__(self, model: nn.Module, *, sink: linear.DigitSink | None, terms: LossTerms, strict: bool):
        super().__init__()
        self.model, self.sink, self.terms, self.strict = model, sink, terms, strict
        self._suspended = False
        self._replacements: dict[Callable, Callable] = {
            F.linear: self._linear,
            linear.linear: self._linear,
            **{func: partial(self._loss, func) for func in LOSS_FUNCTIONS},
            loss.exact_mean: self._exact_mean,
            **dict.fromkeys(_RELU, self._relu),
            **dict.fromkeys(_INPLACE_RELU, self._inplace_relu),
            **dict.fromkeys(_MEAN, self._mean),
        }

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Calls pass untouched: for code that only looks at values, such as logging."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        replacement = self._replacements.get(func)
        if replacement is not None:
            try:
                return replacement(*args, **kwargs)
            except DetError:
                if self.strict:
                    raise
                return func(*args, **kwargs)
        if not self.strict:
            return func(*args, **kwargs)
        name = _name_of(func)
        operands = [value for value in _flatten((args, kwargs)) if isinstance(value, Tensor)]
        with_gradient = torch.is_grad_enabled() and any(value.requires_grad for value in operands)
        if name in _RANDOM:
            raise self.refusal(
                f"the random call {name}", "Draw random values in the data set, from the sample's index."
            )
        if name == "backward":
            raise self.refusal("backward", "Return the loss from training_step; the strategy runs backward itself.")
        if name in _HOOKS:
            raise self.refusal(
                name, "A hook would change gradients before the exact sum; change .grad in on_before_optimizer_step."
            )
        # Both now: an operation in place replaces grad_fn.
        means, follows_mean = self.terms.among(operands) if with_gradient else {}, self.terms.hold_mean(operands)
        result = func(*args, **kwargs)
        moves_floats = any(
            isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in _flatten(result)
        )
        if not moves_floats and name != "setitem":
            return result
        if not (means and self.terms.record(name, func, args, kwargs, means, result)):
            self._check(name, operands, with_gradient, args, kwargs, result)
            if follows_mean:
                self._follow_mean(name, args[0] if name == "setitem" else result)
        return result

    def _follow_mean(self, name: str, result: Any) -> None:
        made = [value for value in _flatten(result) if isinstance(value, Tensor)]
        if any(value.requires_grad or any(value is buffer for buffer in self.model.buffers()) for value in made):
            raise UncoveredError(f"{name} is applied to {STATISTIC}")
        self.terms.note_statistics(made)

    def _check(self, name, operands, with_gradient, args, kwargs, result) -> None:
        if with_gradient and name not in ("detach", "data", "requires_grad_"):
            self._refuse_parameters(name, operands)
        if name in _MOVES or (name in _MOVES_WITHOUT_GRADIENT and not with_gradient):
            return
        if name == "getitem" and _is_basic_index(args[1]):
            return
        if name == "setitem" and _is_basic_index(args[1]) and args[0][args[1]].shape == getattr(args[2], "shape", ()):
            return
        if name in _IEEE:
            if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
                raise self.refusal(
                    f"{name} with alpha= or rounding_mode=", "Write the multiplication as a step of its own."
                )
            if with_gradient and any(value.requires_grad and value.shape != result.shape for value in operands):
                raise self.refusal(
                    f"{name} with a gradient through a broadcast",
                    "Its backward pass adds floats in an order of its own; only linear layers sum gradients exactly.",
                )
            return
        raise self.refusal(name)

    def _refuse_parameters(self, name: str, operands: list[Tensor]) -> None:
        for value in operands:
            if value.requires_grad and value.is_leaf and isinstance(value, nn.Parameter):
                raise self.refusal(
                    f"{name} applied to the parameter {self.name_of(value)}",
                    "The exact sum over samples starts at linear layers only: use the parameter through nn.Linear or "
                    "F.linear, or freeze it (requires_grad_(False)).",
                )

    def _linear(self, input, weight, bias=None, *, sink=None):
        if torch.is_autocast_enabled(input.device.type):
            raise self.refusal("linear under torch.autocast", "Leave autocast out; the model is trained in float32.")
        for role, parameter in (("weight", weight), ("bias", bias)):
            if self.sink is not None and parameter is not None and parameter.requires_grad and not parameter.is_leaf:
                raise self.refusal(
                    f"linear with a {role} that is computed from parameters",
                    "Its gradient would be rounded before the sum over all samples; pass the Parameter itself.",
                )
        self.terms.refuse_operands("linear", (input, weight, bias))
        return linear.linear(input, weight, bias, sink=self.sink)

    def _relu(self, input, inplace=False):
        if inplace:
            return self._inplace_relu(input)
        self.terms.refuse_operands("relu", (input,))
        if isinstance(input, nn.Parameter) and self.strict:
            self._refuse_parameters("relu", [input])
        return activation.relu(input)

    def _inplace_relu(self, input):
        return input.copy_(self._relu(input))

    def _loss(self, func, *args, **kwargs):
        self.terms.refuse_operands(func.__name__, tuple(_flatten((args, kwargs))))
        items, mean = loss_call(func, args, kwargs, self.refusal)
        return self._exact_mean(items) if mean else items

    def _mean(self, input, *args, **kwargs):
        if args or kwargs:
            if not self.strict:
                return torch.mean(input, *args, **kwargs)
            raise self.refusal("mean over chosen dimensions or with a dtype", "Covered: values.mean() over all items.")
        return self._exact_mean(input)

    def _exact_mean(self, values, *, undivided=False):
        self.terms.refuse_operands("mean", (values,))
        result = loss.exact_mean(values, undivided=True)
        self.terms.record_mean(result, values)
        return result

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name in the model."""
        for name, candidate in self.model.named_parameters():
            if candidate is parameter:
                return name
        return "(not in the model)"

    def refusal(self, what: str, advice: str = "") -> UncoveredError:
        """The error for an uncovered call, with the path of the module whose code made it."""
        return UncoveredError(
            f'strategy="det" has no arithmetic contract for {what}, called in {self._place()}. '
            + (advice or 'Replace it by covered operations (linear, relu, losses, mean, + - * /, views), or move '
               'it out of training_step (data set, validation, callback), or train with strategy="ddp".')
        )  # fmt: skip

    def _place(self) -> str:
        """Path and line of the innermost module code on the stack."""
        paths = {id(module): path for path, module in self.model.named_modules()}
        frame = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            own_code = frame.f_code.co_filename.startswith(torch.__path__[0])
            if isinstance(owner, nn.Module) and id(owner) in paths and not own_code:
                path = paths[id(owner)]
                where = f"module {path!r}" if path else "the LightningModule itself"
                return f"{where} ({type(owner).__name__}.{frame.f_code.co_name}, line {frame.f_lineno})"
            frame = frame.f_back
        return "code outside the model"


def _name_of(func: Callable) -> str:
    """add_, __add__ and Tensor.add are one name; a property's getter has the property's name."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2]
    return name if name == "requires_grad_" else name.rstrip("_")


def _flatten(value: Any):
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flatten(item)
    else:
        yield value


def _is_basic_index(index: Any) -> bool:
    """Integers, slices, None and Ellipsis: the backward pass copies and adds nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
