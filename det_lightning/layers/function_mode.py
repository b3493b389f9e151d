"""The calls between modules: covered ones run as the contract says, the others are refused by the module's path.

Works on every torch function called inside `with FunctionMode(...)`. A function whose result holds no floating-point
tensor cannot move a bit of the training and passes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from det_lightning.errors import DetError, UncoveredError
from det_lightning.layers.batch_free import BatchFree
from det_lightning.layers.call_names import (
    DIVISIONS,
    FLATTENING,
    HOOKS,
    IEEE,
    RANDOM,
    flat,
    name_of_call,
    true_division,
)
from det_lightning.layers.call_rules import CallRules
from det_lightning.layers.linear_calls import LinearCalls
from det_lightning.layers.loss_terms import STATISTIC, LossTerms
from det_lightning.layers.mean_functions import MeanFunctions
from det_lightning.layers.meetings import GradientSink, Meetings
from det_lightning.layers.model_names import ModelNames
from det_lightning.layers.random_functions import RandomFunctions
from det_lightning.layers.random_places import RandomPlaces
from det_lightning.layers.sample_mixing import SampleMixing
from det_lightning.layers.sample_places import SamplePlaces
from det_lightning.layers.state_reads import StateReads
from det_lightning.ops import activation, linear

_INPLACE_RELU = (F.relu_, torch.relu_, Tensor.relu_)
_RELU = (F.relu, torch.relu, Tensor.relu, activation.relu)
_GRADIENT_PROPERTY = frozenset((Tensor.grad.__get__, Tensor.grad.__set__, Tensor.grad.__delete__))
_PENALTIES = (
    "Covered functions of parameters alone: + - * / with numbers, parameters and buffers, pow(2), abs, clamp, sum, mean, "
    "matmul, linear, relu, exp, log, sqrt, rsqrt, sigmoid, tanh, softplus, silu, gelu, views, casts and cat. Write it with "
    "these, or freeze the parameter (requires_grad_(False))."
)
_MEETINGS = (
    "A parameter meets samples through nn.Linear, F.linear, x @ weight, + - * / or parameter.expand(len(x), ...), where the "
    "exact sum over samples begins. Write it with these, or freeze the parameter (requires_grad_(False))."
)
_LOOKUPS = (
    "Write rows that samples choose as F.one_hot(index, len(table)).to(table.dtype) @ table, whose gradient is an exact "
    "sum; an index that is a buffer may be used as it is. Or freeze the parameter (requires_grad_(False))."
)
_BY_INDEX = frozenset("getitem embedding index_select gather take".split())


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
        reads: is told of every call, if there is one.
    """

    reads: StateReads | None = None

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
        self.model, self.samples, self.strict = model, samples, strict
        self.names = ModelNames(model)
        refusal = self.refusal = self.names.refusal
        self.batch_free = BatchFree(model, samples, elder)
        self.meetings = Meetings(self.batch_free, sink, samples, self.names.name_of, refusal)
        self.terms = LossTerms(samples, self.batch_free, self.batch_free.is_constant)
        self.rules = CallRules(refusal)
        self.mixing = SampleMixing(samples, self.batch_free.is_constant, self.terms.numbers.holds_no_samples)
        self.sample_places = SamplePlaces(samples, self.batch_free.holds_none)
        self.linear_calls = LinearCalls(self.batch_free, self.meetings, self.terms, sink, samples, refusal)
        self._suspended = False
        self._replacements: dict[Callable, Callable] = {
            F.linear: self.linear_calls.linear,
            linear.linear: self.linear_calls.linear,
            **dict.fromkeys(_RELU, self._relu),
            **dict.fromkeys(_INPLACE_RELU, self._inplace_relu),
            **MeanFunctions(self.terms, samples, strict, self.mixing.mixes, refusal).replacements,
        }
        if strict and places is not None:
            functions = RandomFunctions(
                places, self.terms, self.names.module_path, self.batch_free.is_constant, refusal
            )
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

    @property
    def watches(self) -> bool:
        """Whether it refuses what is not covered, now."""
        return self.strict and not self._suspended

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._suspended or func in _GRADIENT_PROPERTY:
            return func(*args, **kwargs)
        name = name_of_call(func)
        operands = [value for value in flat((args, kwargs)) if isinstance(value, Tensor)]
        of_means = self.strict and self.terms.hold_mean(operands)  # whose constants show in the loss's value
        result = self._call(func, name, args, kwargs, operands)
        if self.reads:
            self.reads.follow(name, func, args, kwargs, operands, result)
        if self.strict and not of_means:
            self.terms.numbers.follow(name, args, kwargs, operands, result)
        if self.strict and self.sample_places.follow(name, args, kwargs, operands, result):
            made = [value for value in flat(result) if isinstance(value, Tensor)]
            if any(value.requires_grad for value in made):
                raise UncoveredError(
                    f"{name} makes {STATISTIC} Dimension 0 was taken for the {self.samples} samples; where it holds "
                    f"something else, bring the samples there (movedim)."
                )
            self.terms.note_statistics(made)
        return result

    def _call(self, func: Callable, name: str, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        with_gradient = torch.is_grad_enabled() and any(value.requires_grad for value in operands)
        free = self.strict and with_gradient and self.batch_free.are_all(operands)
        if self.strict:
            self._refuse_stand_ins(name, operands)
            self._refuse_always(name, func, free=free)
        if self.strict and with_gradient:
            met = self._meeting(name, func, args, kwargs, operands, free=free)
            if met is not None:
                return met
        if free:
            parameter = self.batch_free.parameter_below(self.batch_free.among(operands)[0])
            covered, result = self.batch_free.call(name, func, args, kwargs)
            if not covered:
                raise self.refusal(f"{name} applied to the parameter {self.names.name_of(parameter)}", _PENALTIES)
            return result
        if self.strict and not with_gradient:
            constant, result = self.batch_free.constant(name, func, args, kwargs, operands)
            product = result if constant else self.linear_calls.product(name, args)
            if product is not None:
                return product
        replacement = self._replacements.get(func)
        if replacement is not None:
            try:
                return self.linear_calls.apart_from_autocast(replacement, args, kwargs, operands)
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
        if self.mixing.mixes(name, args, kwargs) or self.mixing.pairs(name, operands):
            mixed = flat(args[0] if name == "setitem" else result)
            self.terms.note_statistics([v for v in mixed if isinstance(v, Tensor) and not v.requires_grad])
        moves_floats = any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in flat(result))
        if not moves_floats and name != "setitem":
            if follows_mean:
                self.terms.note_statistics([value for value in flat(result) if isinstance(value, Tensor)])
            return result
        if terms and self.terms.record(name, func, args, kwargs, terms, result, with_gradient=with_gradient):
            return result
        if with_gradient and name not in ("detach", "data", "requires_grad_"):
            self._refuse_parameters(name, operands)
        self.rules.check(name, operands, with_gradient, args, kwargs, result)
        if with_gradient and name in IEEE and isinstance(result, Tensor):
            self.terms.numbers.note(name, args, result)
        if follows_mean:
            self._follow_mean(name, args[0] if name == "setitem" else result)
        return result

    def _refuse_stand_ins(self, name: str, operands: list[Tensor]) -> None:
        """Tensors that stand for others: what is computed with those is not seen."""
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, operands)):
            raise self.refusal(
                f"{name} within a transform of torch.func (grad, vmap)",
                "Write the computation for the whole batch without it; torch.func.functional_call is covered.",
            )
        if any(isinstance(value, FakeTensor) for value in operands):
            raise self.refusal(
                f"{name} within torch.compile",
                "It fuses operations into kernels with roundings of their own: call the function without it.",
            )

    def _refuse_always(self, name: str, func: Callable, *, free: bool) -> None:
        """Calls without a contract whatever their operands are; `free`: they are batch-free."""
        if name in RANDOM and (free or func not in self._replacements):
            raise self.refusal(
                f"the random call {name}",
                "Write det_lightning.random.rand_like(x), randn_like(x), randint_like(x, low, high) or "
                "bernoulli_like(x, p), x a tensor with the samples in dimension 0; or draw in the data set, from the "
                "sample's index.",
            )
        if name == "backward" or func is torch.autograd.grad:
            raise self.refusal(
                name,
                "Return the loss from training_step; the strategy runs backward itself. Gradients come after a step's last "
                "micro-batch: no loss (a gradient penalty) and no input (an adversarial example) can be made of them.",
            )
        if name in HOOKS:
            raise self.refusal(
                name, "A hook would change gradients before the exact sum; change .grad in on_before_optimizer_step."
            )

    def _meeting(
        self, name: str, func: Callable, args: tuple, kwargs: dict, operands: list[Tensor], *, free: bool
    ) -> Tensor | None:
        """The result of a call in which a batch-free tensor meets samples; None if the call is another."""
        expanded = self.meetings.expansion(name, func, args, kwargs)
        if expanded is not None or free or self.terms.hold_mean(operands):
            return expanded
        product = self.linear_calls.product(name, args)
        return self.meetings.arithmetic(name, func, args, kwargs) if product is None else product

    def _follow_mean(self, name: str, result: Any) -> None:
        made = [value for value in flat(result) if isinstance(value, Tensor)]
        if any(value.requires_grad or any(value is buffer for buffer in self.model.buffers()) for value in made):
            raise UncoveredError(f"{name} is applied to {STATISTIC}")
        self.terms.note_statistics(made)

    def _refuse_parameters(self, name: str, operands: list[Tensor]) -> None:
        for value in self.batch_free.among(operands):
            parameter = self.names.name_of(self.batch_free.parameter_below(value))
            advice = _LOOKUPS if name in _BY_INDEX else _MEETINGS
            raise self.refusal(f"{name} applied to the parameter {parameter}", advice)

    def _relu(self, input, inplace=False):
        if inplace:
            return self._inplace_relu(input)
        self.terms.refuse_operands("relu", (input,))
        return activation.relu(input)

    def _inplace_relu(self, input):
        return input.copy_(self._relu(input))


@contextmanager
def all_suspended() -> Iterator[None]:
    """Every function mode of ours on this thread's stack lets calls pass: for the strategy's own code within a step."""
    with ExitStack() as stack:
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, FunctionMode):
                stack.enter_context(mode.suspended())
        yield
