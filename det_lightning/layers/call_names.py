"""What the function mode knows of torch's functions by their names, and how it reads a call."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

# Names of functions and Tensor methods that move or copy bits, or round once (casts).
MOVES = frozenset(
    """view reshape flatten unflatten view_as reshape_as permute transpose t swapaxes movedim squeeze unsqueeze contiguous
    clone detach to type float bfloat16 half cpu narrow select chunk split unbind cat concat concatenate stack T mT H mH
    data requires_grad_ alias ravel hstack vstack as_subclass positive tensor as_tensor from_numpy zeros ones full
    arange zeros_like ones_like full_like new_zeros new_ones new_full new_tensor scalar_tensor eye""".split()
)
# The same, where the backward pass would add floats in an order of its own: only for tensors without gradient.
MOVES_WITHOUT_GRADIENT = frozenset(
    """expand expand_as broadcast_to gather index_select take masked_select roll flip getitem
    setitem max min amax amin maximum minimum clamp clip abs sign repeat tile copy fill zero sort topk one_hot""".split()
)
# IEEE operations, one rounding each; without gradient through a broadcast.
IEEE = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div truediv itruediv true_divide neg".split()
)
# Each element of the result is one of the operands': the gradient goes there.
SELECTIONS = frozenset("where masked_fill".split())
RANDOM = frozenset(
    """rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson uniform random
    exponential geometric cauchy log_normal dropout alpha_dropout feature_dropout rrelu""".split()
)
HOOKS = frozenset("register_hook register_post_accumulate_grad_hook".split())
# Functions that may bring samples together, and the place of their dimension among the arguments.
ACROSS = {
    **dict.fromkeys(
        "max min amax amin flip sort index_select sum any all argmax argmin argsort median mode prod".split(), 1
    ),
    **dict.fromkeys("cumsum cumprod cummax cummin gather unfold nanmedian aminmax count_nonzero".split(), 1),
    **dict.fromkeys("roll topk kthvalue diff rot90 take_along_dim".split(), 2),
}
LAST = frozenset("sort topk argsort kthvalue diff".split())  # along the last dimension unless they are told another
# The same, whatever their arguments are.
WHOLE = frozenset(
    "unique unique_consecutive bincount nonzero histc take masked_select flipud trace as_strided corrcoef cov".split()
)
# They write to places of their first operand, along a dimension.
INTO = frozenset("scatter scatter_add scatter_reduce index_add index_copy index_fill index_put index_reduce".split())
# They look their values up among those of an operand, by its place.
TABLES = {"isin": 1, "bucketize": 1, "searchsorted": 0}
PRODUCTS = frozenset("matmul mm bmm mv dot vdot inner outer ger kron tensordot".split())
# Of two operands, element by element.
ELEMENTWISE = IEEE | frozenset(
    """eq ne lt le gt ge greater greater_equal less less_equal not_equal isclose minimum maximum where masked_fill pow
    and or xor rand ror rxor iand ior ixor logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    floordiv floor_divide mod remainder fmod""".split()
)
DIVISIONS = frozenset("div truediv itruediv true_divide divide".split())
FLATTENING = frozenset("view reshape flatten".split())


def true_division(func: Callable) -> Callable:
    """A tensor on CUDA divided by a number: the stock kernel multiplies by the number's reciprocal, rounded twice; by a
    tensor on the device it divides."""
    return lambda x, divisor: func(x, torch.tensor(divisor, dtype=x.dtype, device=x.device))


def name_of_call(func: Callable) -> str:
    """add_, __add__ and Tensor.add are one name; a property's getter has the property's name."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2]
    return name if name == "requires_grad_" else name.rstrip("_")


def flat(value: Any) -> Iterator[Any]:
    """The leaves of lists, tuples and dictionaries."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat(item)
    else:
        yield value


def is_basic_index(index: Any) -> bool:
    """Integers, slices, None and Ellipsis: the backward pass copies and adds nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
