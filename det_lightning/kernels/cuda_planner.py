"""How many moduli a product takes: a guess per call site, corrected by what the device counted in earlier calls.

A guess that is too small leaves elements undecided; the device finds them and computes them another way, so the guess
changes the time only. The count of them comes back without waiting: it is copied when the product is queued and read
at a later call of the same site.
"""

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..arithmetic.formats import FLOAT32

MINIMUM_MODULI, MAXIMUM_MODULI = 4, 16

# Seconds on an H200, measured. They decide the time, never a bit.
_COST_MULTIPLY_ADD = 2 / 1.2e15
_COST_FLOAT64_MULTIPLY_ADD = 2 / 45e12 / 3
_COST_RESIDUE = 3e-13
_COST_REBUILD = 2e-12
_COST_SHORT = 3.5e-13
_COST_TERM_UNDECIDED = 1.2e-12
_COST_UNDECIDED = 2e-9
_COST_ANY_UNDECIDED = 6e-6

_SETTLING_CALLS = 12
_SAMPLE_EVERY = 32


class Site(NamedTuple):
    """What tells one call site from another."""

    device: int
    batches: int
    rows: int
    columns: int
    terms: int
    x: torch.dtype
    w: torch.dtype
    out: str
    """The output's format, or "digits"."""
    path: str = "steps"
    """Of `cuda_paths.PATHS`."""
    engine: str = "int8"

    def step(self) -> int:
        """Moduli that come and go together: those of one float64 product."""
        return 3 if self.engine == "float64" else 1

    def seconds_a_modulus(self) -> float:
        elements = self.batches * self.rows * self.columns
        residues = self.batches * (self.rows + self.columns) * self.terms
        if self.path == "short":
            return elements * _COST_SHORT + residues * _COST_RESIDUE
        multiply_add = _COST_FLOAT64_MULTIPLY_ADD if self.engine == "float64" else _COST_MULTIPLY_ADD
        return elements * (self.terms * multiply_add + _COST_REBUILD) + residues * _COST_RESIDUE

    def seconds_of(self, undecided: int) -> float:
        if undecided == 0:
            return 0.0
        return _COST_ANY_UNDECIDED + undecided * (_COST_UNDECIDED + self.terms * _COST_TERM_UNDECIDED)


def first_guess(site: Site) -> int:
    """Moduli for normally distributed data."""
    wide = site.x is torch.float32 or site.w is torch.float32
    usual, digits = (11, 14) if wide else (9, 10)
    guess = digits if site.out == "digits" else usual - (2 if site.out != FLOAT32.name else 0)
    return -(-guess // site.step()) * site.step()


@dataclass
class Plan:
    """The state of one site. `undecided[n]` is what the last call with n moduli left undecided."""

    site: Site
    moduli: int
    calls: int = 0
    undecided: dict[int, int] = field(default_factory=dict)
    counters: torch.Tensor | None = None
    """Pinned host memory for the counts in flight; the event says when they are there."""
    event: torch.cuda.Event | None = None
    in_flight: int = 0
    """The moduli of the counted call, 0 if none is in flight."""
    counted: int = 0
    """The one that counts of the two numbers of a tile."""

    def next_call(self) -> int:
        """The moduli of the next call, the guess corrected by the counts that have arrived."""
        self.calls += 1
        if self.in_flight and not torch.cuda.is_current_stream_capturing():
            self.observe()
        return self.moduli

    def observe(self) -> None:
        """Take in the counts of an earlier call if they have arrived, and correct the guess."""
        if not self.in_flight or not self.event.query():
            return
        used, count = self.in_flight, int(self.counters[self.counted :: 2].sum())
        self.in_flight = 0
        self.undecided[used] = count
        if used == self.moduli:
            self.moduli = next_guess(self.site, self.moduli, self.undecided)

    def wants_counts(self) -> bool:
        return not self.in_flight and (self.calls <= _SETTLING_CALLS or self.calls % _SAMPLE_EVERY == 0)

    def send(self, flagged: torch.Tensor, moduli: int, counted: int) -> None:
        """Queue the copy of the counts int32 [2 tiles] of a call that used `moduli`."""
        if self.counters is None or self.counters.shape != flagged.shape:
            self.counters = torch.empty(flagged.shape, dtype=flagged.dtype, pin_memory=True)
            self.event = torch.cuda.Event()
        self.counters.copy_(flagged, non_blocking=True)
        self.event.record(torch.cuda.current_stream(flagged.device))
        self.in_flight, self.counted = moduli, counted


def next_guess(site: Site, moduli: int, undecided: dict[int, int]) -> int:
    """The number of moduli to try next, from the counts seen with each number so far: a number not tried yet where it
    promises something, else the cheapest of those tried."""
    modulus, cost, step = site.seconds_a_modulus(), site.seconds_of(undecided[moduli]), site.step()
    elements = site.batches * site.rows * site.columns
    # Above the last number that was too few, or far off: two steps.
    more = moduli + step * (2 if undecided[moduli] > elements // 16 else 1)
    more = min(more, MAXIMUM_MODULI // step * step)
    if cost > modulus * step and more not in undecided:
        return more
    fewer = moduli - step
    if fewer >= MINIMUM_MODULI and fewer not in undecided and cost < modulus * step / 8:
        return fewer
    return min(undecided, key=lambda tried: tried * modulus + site.seconds_of(undecided[tried]))


_plans: dict[Site, Plan] = {}
_lock = threading.Lock()


def plan_of(site: Site) -> Plan:
    """The plan of a site, which all threads share."""
    plan = _plans.get(site)
    if plan is None:
        with _lock:
            plan = _plans.setdefault(site, Plan(site, first_guess(site)))
    return plan


def forget() -> None:
    """Start over: every site guesses again."""
    for plan in _plans.values():
        plan.moduli, plan.calls, plan.in_flight = first_guess(plan.site), 0, 0
        plan.undecided.clear()
