"""The reducer on several ranks: every form of the exchange gives the bits of the sum of full digits."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed import exchange
from det_lightning.distributed.all_reduce import add_over_ranks
from det_lightning.distributed.reducer import GradientReducer, MeanPart
from det_lightning.layers.loss_calls import count_digits
from det_lightning.ops.digits import det_finalize
from det_lightning.ops.loss import exact_mean
from det_lightning.ops.reduction import det_sum_partial
from tests.claims.processes import on_ranks
from tests.distributed.collected import UPSTREAM, add, collector, expected_weight_gradient
from tests.distributed.test_all_reduce import join
from tests.ops.exact_oracle import INF, NAN, wide_values
from tests.same_bits import assert_same_bits

# Several ranks
NAMES = ["a", "b", "c", "d", "e"]


SHAPES = [(40, 33), (7,), (300, 2), (1, 1), (5, 512)]


def plain_sums(group_parts: list[list[torch.Tensor]], denominator: int) -> list[torch.Tensor]:
    """Full digits of every part, added over ranks in one integer all-reduce: what the exchange must equal."""
    results = []
    for parts in group_parts:
        digits = torch.zeros((*parts[0].shape, NB), dtype=torch.int64)
        for part in parts:
            digits += item_digits_of_each(part)
        add_over_ranks(digits)
        results.append(det_finalize(digits, denominator=denominator))
    return results


def item_digits_of_each(x: torch.Tensor) -> torch.Tensor:
    return det_sum_partial(x.unsqueeze(-1), dim=-1)


def contributions(rank: int, micro: int, special: bool) -> list[torch.Tensor]:
    """Gradients that span up to a few hundred bits over a block; a rank without any of some parameter."""
    values = [wide_values(100 * rank + 10 * micro + i, *shape, spread=15) for i, shape in enumerate(SHAPES)]
    if rank == 1:
        values[2] = torch.zeros(SHAPES[2])
    if special and rank == 0:
        values[0][3, 4], values[1][2] = INF, NAN
    return values


def exchange_all(rank: int, world_size: int, port: int):
    """Every form of the exchange against the plain sum of full digits: (how many were compared)."""
    join(rank, world_size, port)
    levels = None
    if world_size == 4:
        inner = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        levels = [inner[rank // 2], across[rank % 2]]
    compared = 0
    for special, micros, denominator in ((False, 1, 12), (False, 3, 12), (True, 2, 7), (False, 2, 2**33 + 1)):
        tensors = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        parts = [[contributions(rank, m, special)[i] for m in range(micros)] for i in range(len(SHAPES))]
        expected = plain_sums(parts, denominator)
        forms = [{}, {"bucket_elements": 1}, {"bucket_elements": 1000}, {"full": True}, {"in_transit": True}]
        forms += [{"levels": levels}, {"levels": levels, "bucket_elements": 1}] if levels else []
        forms += [{"levels": levels, "in_transit": True}] if levels else []
        apart = [{"least_apart": 1, "levels": levels}, {"least_apart": 1, "bucket_elements": 1}]
        forms += [*apart, {"least_apart": 1, "in_transit": True}, {"least_apart": 1, "full": True}]
        for form in forms:
            form = dict(form)
            windows = exchange.windows_on
            if form.pop("full", False):
                exchange.windows_on = lambda device_type: False
            in_transit = form.pop("in_transit", False)
            reducer = GradientReducer(zip(NAMES, tensors, strict=True), means=1, **form)
            if in_transit:
                reducer._exchange.adds_in_transit = lambda words: True
            for micro in range(micros):
                last = micro == micros - 1
                for tensor in tensors:
                    reducer.expect(tensor)
                mean = MeanPart(count_digits(rank), count_digits(denominator if rank == 0 and micro == 0 else 0))
                reducer.add_loss([mean], [[0]], 7)
                reducer.begin(0, last=last)
                # Backward reaches the layers in another order on every rank, and takes its time.
                for place in random.Random(rank).sample(range(len(SHAPES)), len(SHAPES)):
                    if place == 3 and rank != 0:
                        continue  # a branch that this rank does not take
                    if place == 4 and (rank + micro) % 3:
                        reducer.add_product(tensors[place], torch.eye(5), parts[place][micro].t())
                    else:
                        reducer.digits(tensors[place]).add_(item_digits_of_each(parts[place][micro]))
                    time.sleep(0.001 * (rank == 1))
                reducer.end()
            reducer.reduce()
            exchange.windows_on = windows
            for place, (tensor, want) in enumerate(zip(tensors, expected, strict=True)):
                if place != 3:
                    assert_same_bits(tensor.grad, want)
                    compared += 1
                else:
                    assert tensor.grad is not None, "used by one rank"
                tensor.grad = None
    return compared


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_C06_C17_words_levels_and_buckets_give_the_bits_of_the_sum_of_full_digits(world_size):
    counts = on_ranks(world_size, exchange_all)
    assert set(counts) == {4 * 4 * (12 if world_size == 4 else 9)}


def reduce_part(rank: int, world_size: int, port: int):
    """Ranks with unlike numbers of micro-batches and samples; the last has none."""
    join(rank, world_size, port)
    reducer = collector()
    reducer.add_sample_digest(2**63 + rank)
    micros = {0: [[0, 1], [2]], 1: [list(range(3, 12))], 2: []}[rank]
    for rows in micros:
        add(reducer, rows, last=rows is micros[-1])
    if rank == 2:
        reducer.weightless = True
        add(reducer, [5], last=True)
    (mean,), digest = reducer.reduce()
    gradients = {name: parameter.grad for name, parameter in reducer.parameters}
    return gradients, mean, digest


def test_ranks_add_up_like_micro_batches():
    for gradients, mean, digest in on_ranks(3, reduce_part):
        assert_same_bits(gradients["weight"], expected_weight_gradient())
        assert gradients["unused"] is None
        assert_same_bits(mean, exact_mean(UPSTREAM[:, 0]))
        assert digest == (3 * 2**63 + 3) % 2**64


def test_a_sum_of_floats_fails_the_same_check():
    """The same parts, grouped otherwise."""
    first, second, third = (contributions(rank, 0, False)[0] for rank in range(3))
    left, right = (first + second) + third, first + (second + third)
    assert (left.view(torch.int32) != right.view(torch.int32)).any()
