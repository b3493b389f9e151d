"""Long-accumulator states as tensors: int64 [..., NB], added elementwise, rounded once.

value = (sum over j < 18 of state[j] * 2^(32 j - 298)) / denominator; places 18, 19, 20 count NaN, +inf and -inf terms.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch

from ..arithmetic.formats import FORMATS, NB, Format
from ..arithmetic.long_accumulator import finalize as finalize_state
from ..arithmetic.long_accumulator import fraction_of
from ..errors import InputError
from ..kernels.dispatch import check_device, kernels_of
from .registration import is_traced

_FORMS = {torch.float32: FORMATS["float32"], torch.bfloat16: FORMATS["bfloat16"], torch.float16: FORMATS["float16"]}


def output_form(operation: str, dtype: torch.dtype) -> Format:
    """The format of an output dtype; raises InputError for one that is not covered."""
    form = _FORMS.get(dtype)
    if form is None:
        raise InputError(f"{operation}: dtype is {dtype}; allowed: torch.float32, torch.bfloat16, torch.float16")
    return form


def check_states(operation: str, name: str, states: object) -> None:
    """Raise InputError unless `states` is an int64 CPU tensor whose last size is NB."""
    if not isinstance(states, torch.Tensor):
        raise InputError(f"{operation}: {name} is a {type(states).__name__}; pass an int64 tensor [..., {NB}]")
    if states.dtype is not torch.int64 or states.dim() == 0 or states.shape[-1] != NB:
        raise InputError(
            f"{operation}: {name} is {states.dtype} {list(states.shape)}; digits are int64 [..., {NB}], "
            f"as zero_digits and the *_partial functions return them"
        )
    check_device(operation, name, states)


def zero_digits(shape: Sequence[int], *, device: torch.device | str | None = None) -> torch.Tensor:
    """The states of empty sums: int64 zeros [*shape, NB]."""
    return torch.zeros((*shape, NB), dtype=torch.int64, device=device)


def det_combine(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The exact elementwise sum of states of one shape, in any order. Not canonical; 2^31 canonical ones may be added.

    Raises InputError for an empty list, or for tensors that are no digits or differ in shape.
    """
    if isinstance(states, torch.Tensor) or len(states) == 0:
        raise InputError("det_combine: pass a list of at least one digit tensor, for example det_combine([a, b])")
    for i, state in enumerate(states):
        check_states("det_combine", f"states[{i}]", state)
        if state.shape != states[0].shape:
            raise InputError(
                f"det_combine: states[{i}] is {list(state.shape)} but states[0] is {list(states[0].shape)}; "
                f"only states of one shape add up"
            )
    total = states[0].clone(memory_format=torch.contiguous_format)
    for state in states[1:]:
        total += state
    return total


def normalise_digits(acc: torch.Tensor) -> torch.Tensor:
    """A canonical copy of `acc` [..., NB]: digits 0..16 in [0, 2^32), digit 17 signed, the same value and counts."""
    check_states("normalise_digits", "acc", acc)
    return kernels_of("reduction").normalise(acc.clone(memory_format=torch.contiguous_format))


def det_finalize(acc: torch.Tensor, *, dtype: torch.dtype = torch.float32, denominator: int = 1) -> torch.Tensor:
    """The value of each state divided by `denominator`, rounded once to `dtype` (ties to even).

    acc: int64 [..., NB], canonical or not. Returns [...] of float32, bfloat16 or float16. An exact zero is +0; any NaN
    term, infinities of both signs or 0/0 give the canonical NaN; x/0 is an infinity with the sign of x.
    Raises InputError for a tensor that is no digits, another dtype, or a denominator that is negative or no integer.
    """
    if is_traced(acc):
        return torch.ops.det_lightning.finalize(acc, dtype, denominator)
    return compute_finalize(acc, dtype, denominator)


def compute_finalize(acc: torch.Tensor, dtype: torch.dtype, denominator: int) -> torch.Tensor:
    """`det_finalize` on a plain tensor."""
    check_states("det_finalize", "acc", acc)
    form = output_form("det_finalize", dtype)
    if not isinstance(denominator, int) or denominator < 0:
        raise InputError(
            f"det_finalize: denominator is {denominator!r}; it must be a Python integer of at least 0, "
            f"the exact count to divide by"
        )
    acc = acc.contiguous()
    if denominator < 1 << 31:
        return kernels_of("reduction").finalize(acc, form, int(denominator))
    # Counts beyond 2^31 are rare: the definition itself computes them.
    patterns = [finalize_state(state, form, denominator) for state in acc.view(-1, NB).tolist()]
    signed = [p - (1 << form.bits) if p & form.sign_bit else p for p in patterns]
    integer = torch.int32 if form.bits == 32 else torch.int16
    return torch.tensor(signed, dtype=integer, device=acc.device).view(dtype).view(acc.shape[:-1])


def digits_value(acc: torch.Tensor) -> Fraction | float:
    """The exact value of one state [NB] as a fraction, or a float nan, inf or -inf where a term was none."""
    check_states("digits_value", "acc", acc)
    if acc.dim() != 1:
        raise InputError(f"digits_value: acc is {list(acc.shape)}; pass one state [{NB}], for example acc[i]")
    return fraction_of(acc.tolist())
