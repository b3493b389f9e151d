"""Gradient sums over all samples of the global batch: digits of every product, added over micro-batches and ranks.

A parameter's digits lie in a bucket (buckets.py). In the last micro-batch of a step a bucket whose parameters have all
received their digits begins its exchange (exchange.py) while the backward pass goes on (pipeline.py); the others follow at
the end. Means that divide by unlike numbers have a backward pass and sums of their own, the groups; a gradient is the sum
of the groups' finished gradients in their order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
import torch.distributed as dist

from det_lightning.distributed.bucket_sum import BucketSum
from det_lightning.distributed.buckets import LEAST_APART, bucket_elements_for, fill_buckets
from det_lightning.distributed.exchange import Exchange
from det_lightning.distributed.local_sum import DigitPool
from det_lightning.distributed.met_functions import MetFunctions
from det_lightning.distributed.pipeline import Pipeline
from det_lightning.distributed.tally import Tally
from det_lightning.distributed.waiting import wait
from det_lightning.errors import DetError, UncoveredError
from det_lightning.ops.canonical import canonical_nan


@dataclass(frozen=True)
class MeanPart:
    """One mean of the loss of a micro-batch: int64 [NB] sum and denominator; `total` for a sum, whose denominator is 1."""

    digits: torch.Tensor
    denominator: torch.Tensor
    total: bool = False


class GradientReducer:
    """Collects the digits of one optimizer step and turns them into gradients.

    For every micro-batch: `add_loss`, then for each group `begin`, a backward pass, `end`; after the last one `reduce`.

    Args:
        parameters: (name, parameter) of everything that may receive a gradient, in the same order on every rank.
        means: the most means a loss is made of.
        group: the process group of the replicas; the default group if None.
        levels: see `Exchange`.
        bucket_elements: about how many gradient elements travel together; what suits the device if None.
        announced: every gradient of a backward pass was announced by `expect`, and by nothing else; otherwise no bucket
            begins its exchange before the backward pass is over.
        frozen_too: parameters that do not require a gradient now may later.
        least_apart: see `fill_buckets`; what suits the device if None.

    Attributes:
        weightless: the current micro-batch stands in for an empty slice: its digits and means count for nothing.
        functions: of parameters that met samples in this step; what stands in for them is reduced after the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        means: int,
        group: dist.ProcessGroup | None = None,
        levels: Sequence[dist.ProcessGroup] | None = None,
        bucket_elements: int | None = None,
        announced: bool = True,
        frozen_too: bool = False,
        least_apart: int | None = None,
    ):
        self._announced = announced
        self.parameters = [(name, p) for name, p in parameters if p.requires_grad or frozen_too]
        self.weightless = False
        self._exchange = Exchange(group, levels)
        tensors = [parameter for _, parameter in self.parameters]
        device = tensors[0].device if tensors else torch.device("cpu")
        self._bucket_elements = bucket_elements or self._exchange.least(bucket_elements_for(device), device)
        least_apart = LEAST_APART.get(device.type) if least_apart is None else least_apart
        self.buckets = fill_buckets(
            tensors, most=self._bucket_elements, parts=self._exchange.ranks, least_apart=least_apart
        )
        self._device = device
        self._pipeline = Pipeline(device)
        self._tally = Tally(means)
        self._pool = DigitPool()
        self._own = (len(self.parameters), len(self.buckets))
        self._places: dict[int, tuple[int, int, int]] = {}  # id -> place, bucket, offset
        self._lay_out(0)
        self.functions = MetFunctions()
        self.clear()

    @property
    def own_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """`parameters` without what stands in for functions of them."""
        return self.parameters[: self._own[0]]

    def expect(self, parameter: torch.Tensor) -> None:
        """One use of the parameter in the forward pass of this micro-batch."""
        place = self._place_of(parameter)[0]
        self._expected[place] = self._expected.get(place, 0) + 1

    def admit(self, number: int, tensor: torch.Tensor, made_of: tuple[str, ...]) -> torch.Tensor:
        """What stands for a function of parameters that meets samples; see `MetFunctions.admit`."""
        function = self.functions.admit(number, tensor, made_of)
        if id(function.stand_in) not in self._places:
            self._places[id(function.stand_in)] = (len(self.parameters), -1, 0)
            self.parameters.append((function.name, function.stand_in))
        return function.stand_in

    def forget_functions(self) -> None:
        """Begins a step: the functions of parameters are those of its own micro-batches."""
        for _, stand_in in self.parameters[self._own[0] :]:
            del self._places[id(stand_in)]
        del self.parameters[self._own[0] :], self.buckets[self._own[1] :]
        self.functions = MetFunctions()

    def digits(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """int64 [*parameter.shape, NB] that a backward pass adds into; None while the micro-batch has weight zero."""
        local, offset = self._collect(parameter)
        return None if local is None else local.digits(offset, parameter.shape)

    def added(self, parameter: torch.Tensor) -> None:
        """What `digits` handed out last has been added to."""
        self._settle()

    def add_product(self, parameter: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
        """Adds x @ w.T, of the parameter's shape, to its sum."""
        local, offset = self._collect(parameter)
        if local is not None:
            local.add_product(offset, parameter.shape, x, w)
        self._settle()

    @property
    def collecting(self) -> tuple[str, torch.Tensor] | None:
        """Name and parameter of the digits that a backward pass is adding to."""
        return None if self._open is None else self.parameters[self._open[0]]

    def add_loss(self, means: Sequence[MeanPart], groups: list[list[int]], structure: int, pattern: int = 0) -> None:
        """The means of one micro-batch, and which of them share a denominator; see `LossPlan`."""
        self._totals, self._groups = [mean.total for mean in means], groups
        self._tally.add_pattern(self.functions.pattern(pattern))
        if not self.weightless:
            self._tally.add_means([m.digits for m in means], [m.denominator for m in means], structure)

    def add_sample_digest(self, digest: int) -> None:
        """Adds the digest of a micro-batch's samples, modulo 2^64."""
        self._tally.add_sample_digest(digest)

    def begin(self, group: int, *, last: bool) -> None:
        """A backward pass through the means of a group begins; `last`: it is the step's last micro-batch."""
        if last and not self._started:
            self._tally.start(self._exchange, self._device)
            self._started = True
        if last and group:
            self._wait()  # a rank with other groups is found before it starts other collectives
        self._group, self._last, self._launched, self._open = group, last, 0, None
        self._fill_buckets_of_functions()
        self._left = dict(self._expected)

    def end(self) -> None:
        """The backward pass is over."""
        self._settle()
        if self._last:
            while self._launched < len(self.buckets):
                self._launch()
        else:
            for number in range(len(self.buckets)):
                if (self._group, number) in self._local:
                    self._local[self._group, number].close()
        if self._group == len(self._groups) - 1:
            self._expected = {}

    def reduce(self) -> tuple[list[torch.Tensor], int]:
        """Finishes the exchanges, writes every used parameter's `.grad`, and clears.

        Returns:
            (each mean or sum of the loss over the global batch, float32; the digest of all its samples, unsigned).

        Raises:
            UncoveredError: the micro-batches made their losses unlike.
        """
        used = torch.zeros(len(self.parameters), dtype=torch.int64)
        used[list(self._used)] = 1
        used = used.to(self._device)
        work = self._exchange.add(used, largest=True)
        self._pipeline.finish()
        self._wait()
        wait(work)
        used = used.tolist()
        self._exchange.check()
        for number, bucket in enumerate(self.buckets):
            for place, offset in zip(bucket.places, bucket.offsets, strict=True):
                if used[place]:
                    self._write(self.parameters[place][1], number, offset)
        self.functions.backward()
        means = [self._tally.mean(place, total=total) for place, total in enumerate(self._totals)]
        digest = self._tally.sample_digest
        self.clear()
        return means, digest

    def clear(self) -> None:
        """Forgets everything that was added."""
        self._pipeline.drop()
        self._tally.clear()
        self._used: set[int] = set()  # places
        self._local: dict[tuple[int, int], BucketSum] = {}
        self._finished: dict[tuple[int, int], torch.Tensor] = {}
        self._expected: dict[int, int] = {}  # place -> uses in this micro-batch's forward pass
        self._left: dict[int, int] = {}
        self._totals: list[bool] = []
        self._groups: list[list[int]] = [[]]
        self._group = self._launched = 0
        self._open: tuple[int, int] | None = None  # place and bucket of what is being collected
        self._last = self._started = self._complete = False

    def _collect(self, parameter: torch.Tensor) -> tuple[BucketSum | None, int]:
        """(the sum that a gradient is added to now, where it begins there); None while the micro-batch has weight zero."""
        place, number, offset = self._place_of(parameter)
        self._settle()
        if number < self._launched:
            raise DetError(
                f"the parameter {self.parameters[place][0]} received a gradient after all that its forward pass announced; "
                f"please report this"
            )
        self._open = place, number
        if self.weightless:
            return None, offset
        self._used.add(place)
        return self._sums(self._group, number), offset

    def _place_of(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        found = self._places.get(id(parameter))
        if found is None:
            raise UncoveredError(
                f"a parameter of shape {tuple(parameter.shape)} that is not in the model, or was frozen when the step "
                f"began, received a gradient. Register it in the LightningModule, and unfreeze it between two steps "
                f"(on_train_epoch_start)."
            )
        return found

    def _fill_buckets_of_functions(self) -> None:
        """Functions that were admitted since get buckets, after all others."""
        first = sum(len(bucket.places) for bucket in self.buckets)
        if first == len(self.parameters):
            return
        start, new = len(self.buckets), [stand_in for _, stand_in in self.parameters[first:]]
        for bucket in fill_buckets(new, most=self._bucket_elements, parts=self._exchange.ranks):
            self.buckets.append(replace(bucket, places=tuple(first + place for place in bucket.places)))
        self._lay_out(start)

    def _lay_out(self, start: int) -> None:
        for number, bucket in enumerate(self.buckets[start:], start):
            for place, offset in zip(bucket.places, bucket.offsets, strict=True):
                self._places[id(self.parameters[place][1])] = (place, number, offset)

    def _sums(self, group: int, number: int) -> BucketSum:
        key = (group, number)
        if key not in self._local:
            bucket = self.buckets[number]
            names = ", ".join(self.parameters[place][0] for place in bucket.places)
            self._local[key] = BucketSum(bucket, self._pool, names)
        return self._local[key]

    def _settle(self) -> None:
        """The digits that were handed out last have been added: what is complete is exchanged, in order, or closed."""
        if self._open is None:
            return
        place, number = self._open
        self._left[place] = self._left.get(place, 1) - 1
        self._open = None
        if not self._announced:
            return
        if not self._last:
            if self._is_complete(number) and (self._group, number) in self._local:
                self._local[self._group, number].close()
            return
        while self._launched < len(self.buckets) and self._is_complete(self._launched):
            self._launch()

    def _is_complete(self, number: int) -> bool:
        return not any(self._left.get(place, 0) > 0 for place in self.buckets[number].places)

    def _launch(self) -> None:
        number, group = self._launched, self._group
        if number >= self._own[1]:
            self._wait()  # a rank with other functions is found before it starts other collectives
        self._launched += 1
        local = self._sums(group, number)

        def done(values: torch.Tensor) -> None:
            self._finished[group, number] = values

        self._pipeline.launch(
            self._exchange.stages(local, lambda: self._denominator(group), self.buckets[number].dtype), done
        )

    def _wait(self) -> None:
        if not self._complete:
            self._tally.wait()
            self._tally.check()
            self._complete = True

    def _denominator(self, group: int) -> Fraction:
        self._wait()
        place = self._groups[group][0]
        return self._tally.denominator(place, total=self._totals[place])

    def _write(self, parameter: torch.nn.Parameter, number: int, offset: int) -> None:
        gradient = None
        for group in range(len(self._groups)):
            part = self._finished[group, number][offset : offset + parameter.numel()].view(parameter.shape)
            gradient = part if gradient is None else canonical_nan(gradient + part)
        parameter.grad = gradient
