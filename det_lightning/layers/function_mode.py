"""The calls between modules: covered ones run as the contract says, the others are refused by the module's path.

Works on every torch function called inside `with FunctionMode(...)`. A function whose result holds no floating-point
tensor cannot move a bit of the training and passes.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from det_lightning.errors import DetError, UncoveredError
from det_lightning.layers.batch_free import BatchFree
from det_lightning.layers.call_names import (
    ACROSS,
    DIVISIONS,
    FLATTENING,
    HOOKS,
    IEEE,
    MOVES,
    MOVES_WITHOUT_GRADIENT,
    RANDOM,
    flat,
    is_basic_index,
    name_of_call,
    true_division,
)
from det_lightning.layers.loss_terms import STATISTIC, LossTerms
from det_lightning.layers.mean_functions import MeanFunctions
from det_lightning.layers.meetings import GradientSink, Meetings, Place
from det_lightning.layers.random_functions import RandomFunctions
from det_lightning.layers.random_places import RandomPlaces
from det_lightning.ops import activation, linear

_INPLACE_RELU = (F.relu_, torch.relu_, Tensor.relu_)
_RELU = (F.relu, torch.relu, Tensor.relu, activation.relu)
_GRADIENT_PROPERTY = frozenset((Tensor.grad.__get__, Tensor.grad.__set__, Tensor.grad.__delete__))
_PENALTIES = (
    "Covered functions of parameters alone: + - * / with numbers, parameters and buffers, pow(2), abs, sum, mean, matmul, "
    "linear, relu, exp, log, sqrt, rsqrt, sigmoid, tanh, softplus, silu, gelu, views, casts and cat. Write it with these, "
    "or freeze the parameter (requires_grad_(False))."
)
_MEETINGS = (
    "A parameter meets samples through nn.Linear, F.linear, x @ weight, + - * / or parameter.expand(len(x), ...), where the "
    "exact sum over samples begins. Write it with these, or freeze the parameter (requires_grad_(False))."
)


class FunctionMode(TorchFunctionMode):
    """Replaces covered functions while a step of the model runs.

    Args:
        model: for the names of modules and parameters in errors.
        sink: receives the digits of parameter gradients.
        samples: of the micro-batch.
        places: where random numbers come from, or None.
        elder: see `BatchFree`.
        strict: refuse uncovered functions; otherwise (evaluation, which moves no weight) they run as they are.

    Attributes:
        terms: how the loss is made of means.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sink: GradientSink | None,
        samples: int,
        strict: bool,
        places: RandomPlaces | None = None,
        elder: BatchFree | None = None,
    ):
        super().__init__()
        self.places = places
        self.model, self.sink, self.samples, self.strict = model, sink, samples, strict
        self.batch_free = BatchFree(model, samples, elder)
        self.meetings = Meetings(self.batch_free, sink, samples, self.name_of, self.refusal)
        self.terms = LossTerms(samples, self.batch_free)
        self._suspended = False
        self._autocast_dtype: torch.dtype | None = None
        self._paths: dict[int, str] | None = None
        self._replacements: dict[Callable, Callable] = {
            F.linear: self._linear,
            linear.linear: self._linear,
            **dict.fromkeys(_RELU, self._relu),
            **dict.fromkeys(_INPLACE_RELU, self._inplace_relu),
            **MeanFunctions(self.terms, samples, strict, self.refusal).replacements,
        }
        if strict and places is not None:
            functions = RandomFunctions(places, self.terms, self._module_path, self.refusal)
            self._replacements |= functions.replacements

    def again(self) -> Callable[[], "FunctionMode"]:
        """Of a region that begins now: (() -> the mode under which it is computed again in a backward pass)."""
        places = self.places
        calls = None if places is None else dict(places.calls)

        def mode() -> FunctionMode:
            # Without a sink: the graph that is made again has no backward pass, and announces no gradients.
            here = None if places is None else places.again(calls)
            options = {"samples": self.samples, "strict": self.strict, "elder": self.batch_free}
            return FunctionMode(self.model, sink=None, places=here, **options)

        return mode

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
        if self._suspended or func in _GRADIENT_PROPERTY:
            return func(*args, **kwargs)
        name = name_of_call(func)
        operands = [value for value in flat((args, kwargs)) if isinstance(value, Tensor)]
        with_gradient = torch.is_grad_enabled() and any(value.requires_grad for value in operands)
        free = self.strict and with_gradient and self.batch_free.are_all(operands)
        if self.strict:
            self._refuse_always(name, func, free=free)
        if self.strict and with_gradient and (met := self._meeting(name, func, args, kwargs, operands)) is not None:
            return met
        if free:
            covered, result = self.batch_free.call(name, func, args, kwargs)
            if not covered:
                parameter = self.batch_free.parameter_below(self.batch_free.among(operands)[0])
                raise self.refusal(f"{name} applied to the parameter {self.name_of(parameter)}", _PENALTIES)
            return result
        replacement = self._replacements.get(func)
        if replacement is not None:
            try:
                return self._apart_from_autocast(replacement, args, kwargs, operands)
            except DetError:
                if self.strict:
                    raise
                return func(*args, **kwargs)
        if not self.strict:
            # What is logged of a mean keeps its items, so that epochs add up exactly.
            terms = self.terms.among(operands)
            result = func(*args, **kwargs)
            if terms:
                self.terms.record(name, func, args, kwargs, terms, result, with_gradient=False)
            return result
        if name in DIVISIONS and len(args) == 2 and isinstance(args[1], (int, float)) and operands[0].is_cuda:
            func = true_division(func)
        # Both now: an operation in place replaces grad_fn.
        terms, follows_mean = self.terms.among(operands), self.terms.hold_mean(operands)
        result = func(*args, **kwargs)
        if not with_gradient:
            self.batch_free.note(name, operands, result)
        if self.places is not None and name in FLATTENING and isinstance(args[0], Tensor):
            self.places.note_flatten(args[0].shape, result.shape)
        moves_floats = any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in flat(result))
        if not moves_floats and name != "setitem":
            return result
        if terms and self.terms.record(name, func, args, kwargs, terms, result, with_gradient=with_gradient):
            return result
        self._check(name, operands, with_gradient, args, kwargs, result)
        if not with_gradient and self._mixes_samples(name, args, kwargs):
            self.terms.note_statistics([value for value in flat(result) if isinstance(value, Tensor)])
        if follows_mean:
            self._follow_mean(name, args[0] if name == "setitem" else result)
        return result

    def _refuse_always(self, name: str, func: Callable, *, free: bool) -> None:
        """Calls without a contract whatever their operands are; `free`: they are batch-free."""
        if name in RANDOM and (free or func not in self._replacements):
            raise self.refusal(
                f"the random call {name}",
                "Write det_lightning.random.rand_like(x), randn_like(x), randint_like(x, low, high) or "
                "bernoulli_like(x, p), x a tensor with the samples in dimension 0; or draw in the data set, from the "
                "sample's index.",
            )
        if name == "backward":
            raise self.refusal("backward", "Return the loss from training_step; the strategy runs backward itself.")
        if name in HOOKS:
            raise self.refusal(
                name, "A hook would change gradients before the exact sum; change .grad in on_before_optimizer_step."
            )

    def _meeting(self, name: str, func: Callable, args: tuple, kwargs: dict, operands: list[Tensor]) -> Tensor | None:
        """The result of a call in which a batch-free tensor meets samples; None if the call is another."""
        expanded = self.meetings.expansion(name, func, args, kwargs)
        if expanded is not None or self.batch_free.are_all(operands) or self.terms.hold_mean(operands):
            return expanded
        if name in ("matmul", "mm") and len(args) == 2 and args[1].dim() == 2 and args[0].dim() > 1:
            weight = args[1]
            if weight.requires_grad and self.batch_free(weight):
                _, transposed = self.batch_free.call("t", Tensor.t, (weight,), {})
            elif self.batch_free.is_constant(weight):
                transposed = weight.t()
            else:
                return None
            return self._apart_from_autocast(self._linear, (args[0], transposed), {}, operands)
        return self.meetings.arithmetic(name, func, args, kwargs)

    def _follow_mean(self, name: str, result: Any) -> None:
        made = [value for value in flat(result) if isinstance(value, Tensor)]
        if any(value.requires_grad or any(value is buffer for buffer in self.model.buffers()) for value in made):
            raise UncoveredError(f"{name} is applied to {STATISTIC}")
        self.terms.note_statistics(made)

    def _check(self, name, operands, with_gradient, args, kwargs, result) -> None:
        if with_gradient and name not in ("detach", "data", "requires_grad_"):
            self._refuse_parameters(name, operands)
        if name in MOVES or (name in MOVES_WITHOUT_GRADIENT and not with_gradient):
            return
        if name == "getitem" and is_basic_index(args[1]):
            return
        if name == "setitem" and is_basic_index(args[1]) and args[0][args[1]].shape == getattr(args[2], "shape", ()):
            return
        if name in IEEE:
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

    def _mixes_samples(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether a call brings samples of the micro-batch together, or to other places of it."""
        x = args[0] if args else None
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != self.samples or self.samples == 1:
            return False
        if self.batch_free.is_constant(x):
            return False
        if name == "getitem":
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            return isinstance(first, (Tensor, list))
        if name not in ACROSS:
            return False
        dim = kwargs.get("dim", kwargs.get("dims", args[ACROSS[name]] if len(args) > ACROSS[name] else None))
        if isinstance(dim, Tensor):  # the larger of two
            return False
        if dim is None and name in ("sort", "topk"):
            dim = -1
        dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        return any(d % x.dim() == 0 for d in dims)

    def _refuse_parameters(self, name: str, operands: list[Tensor]) -> None:
        for value in self.batch_free.among(operands):
            parameter = self.name_of(self.batch_free.parameter_below(value))
            raise self.refusal(f"{name} applied to the parameter {parameter}", _MEETINGS)

    def _linear(self, input, weight, bias=None, *, sink=None):
        places: list[Place | None] = []
        for role, parameter in (("weight", weight), ("bias", bias)):
            if self.sink is None or parameter is None or not parameter.requires_grad:
                places.append(None)
                continue
            if not self.batch_free(parameter):
                raise self.refusal(
                    f"linear with a {role} that is computed from samples",
                    "Its gradient would be rounded before the sum over all samples: write the sum over features with "
                    "operations on samples, (x.unsqueeze(1) * weight), or make the weight of parameters alone.",
                )
            places.append(self.meetings.place(parameter))
        self.terms.refuse_operands("linear", (input, weight, bias))
        weight, bias = (
            operand if place is None else place.leaf for operand, place in zip((weight, bias), places, strict=True)
        )
        sink = None if self.sink is None else _SinkOf(*places)
        if self._autocast_dtype is not None:
            input = input.to(self._autocast_dtype)
            # A parameter's gradient is the exact sum, not the rounding to bfloat16 of one: the casts carry digits.
            weight, bias = self._cast(weight), self._cast(bias)
        return linear.linear(input, weight, bias, sink=sink)

    def _cast(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or self.sink is None:
            return parameter if parameter is None else parameter.to(self._autocast_dtype)
        return parameter.detach().to(self._autocast_dtype).requires_grad_(parameter.requires_grad)

    def _apart_from_autocast(self, replacement: Callable, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        """The covered call with torch.autocast off inside; linear layers round their operands themselves."""
        device = operands[0].device.type if operands else "cpu"
        if not torch.is_autocast_enabled(device):
            return replacement(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        if dtype is not torch.bfloat16:
            raise self.refusal(
                f"torch.autocast to {dtype}", "Covered: bfloat16, as with Trainer(precision='bf16-mixed')."
            )
        self._autocast_dtype = dtype
        try:
            with torch.autocast(device, enabled=False):
                return replacement(*args, **kwargs)
        finally:
            self._autocast_dtype = None

    def _relu(self, input, inplace=False):
        if inplace:
            return self._inplace_relu(input)
        self.terms.refuse_operands("relu", (input,))
        return activation.relu(input)

    def _inplace_relu(self, input):
        return input.copy_(self._relu(input))

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
        for frame, owner, path in self._modules_on_the_stack():
            if not frame.f_code.co_filename.startswith(torch.__path__[0]):
                where = f"module {path!r}" if path else "the LightningModule itself"
                return f"{where} ({type(owner).__name__}.{frame.f_code.co_name}, line {frame.f_lineno})"
        return "code outside the model"

    def _module_path(self) -> str:
        """Path of the innermost module whose code is running, torch's own included."""
        return next((path for _, _, path in self._modules_on_the_stack()), "")

    def _modules_on_the_stack(self) -> Iterator[tuple[FrameType, nn.Module, str]]:
        """(frame, module, its path) of the model's modules whose code is running, innermost first."""
        if self._paths is None:
            self._paths = {id(module): path for path, module in self.model.named_modules()}
        frame = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._paths:
                yield frame, owner, self._paths[id(owner)]
            frame = frame.f_back


class _SinkOf:
    """The places of one call's weight and bias. Activation checkpointing hands the backward pass a copy of a weight: it is
    told by its number of dimensions."""

    def __init__(self, weight: Place | None, bias: Place | None):
        self._places = {2: weight, 1: bias}

    def digits(self, parameter: Tensor) -> Tensor | None:
        return self._places[parameter.dim()].digits()

    def added(self, parameter: Tensor) -> None:
        self._places[parameter.dim()].added()


@contextmanager
def all_suspended() -> Iterator[None]:
    """Every function mode of ours on this thread's stack lets calls pass: for the strategy's own code within a step."""
    with ExitStack() as stack:
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, FunctionMode):
                stack.enter_context(mode.suspended())
        yield
