"""The reducer: gradients are exact sums over everything that was added, divided once by the exact number of items."""

import gc
import itertools
import random
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed import exchange
from det_lightning.distributed.all_reduce import add_over_ranks
from det_lightning.distributed.buckets import BLOCK, bucket_elements_for, fill_buckets
from det_lightning.distributed.reducer import GradientReducer, MeanPart
from det_lightning.errors import DetError, UncoveredError
from det_lightning.layers.loss_calls import count_digits
from det_lightning.ops.digits import det_finalize
from det_lightning.ops.linear import linear
from det_lightning.ops.loss import exact_mean
from det_lightning.ops.means import item_digits
from det_lightning.ops.reduction import det_sum_partial
from tests.claims.processes import on_ranks
from tests.distributed.test_all_reduce import join
from tests.ops.exact_oracle import INF, NAN, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    weight, bias = torch.nn.Parameter(wide_values(1, 3, 4)), torch.nn.Parameter(wide_values(2, 3))
    unused, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return [("weight", weight), ("bias", bias), ("unused", unused), ("frozen", frozen)]


X, UPSTREAM = wide_values(3, 12, 4), wide_values(4, 12, 3)


def collector(**options) -> GradientReducer:
    return GradientReducer(parameters(), means=4, **options)


def part_of(values: torch.Tensor) -> MeanPart:
    return MeanPart(item_digits(values), count_digits(values.numel()))


def add(reducer: GradientReducer, rows: list[int], *, last: bool = False) -> None:
    """One micro-batch: the digits of these rows, and as many items of the loss."""
    (_, weight), (_, bias) = reducer.parameters[:2]
    reducer.expect(weight)
    reducer.expect(bias)
    reducer.add_loss([part_of(UPSTREAM[rows, 0])], [[0]], 7)
    reducer.begin(0, last=last)
    linear(X[rows], weight, bias, sink=reducer).backward(UPSTREAM[rows])
    reducer.end()


def expected_weight_gradient(rows=range(12), count: int = 12) -> torch.Tensor:
    patterns = [
        rounded([Fraction(UPSTREAM[i, n].item()) * Fraction(X[i, k].item()) for i in rows], torch.float32, count)
        for n in range(3)
        for k in range(4)
    ]
    return from_patterns(patterns, (3, 4), torch.float32)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 12), max_size=5))
def test_a_gradient_is_one_exact_mean_however_it_was_collected(cuts):
    reducer = collector()
    edges = [0, *sorted(cuts), 12]
    for micro, (first, last) in enumerate(itertools.pairwise(edges)):
        add(reducer, list(range(first, last)), last=micro == len(cuts))
    (mean,), digest = reducer.reduce()
    named = dict(reducer.parameters)
    assert_same_bits(named["weight"].grad, expected_weight_gradient())
    assert named["unused"].grad is None and "frozen" not in named
    assert_same_bits(mean, exact_mean(UPSTREAM[:, 0]))
    assert digest == 0


def test_a_reduction_clears_and_a_clear_forgets():
    reducer = collector()
    add(reducer, [0, 1, 2])
    reducer.clear()
    add(reducer, list(range(12)), last=True)
    reducer.add_sample_digest(2**64 - 5)
    reducer.add_sample_digest(2**63 + 7)
    assert reducer.reduce()[1] == (2**64 - 5 + 2**63 + 7) % 2**64
    first = dict(reducer.parameters)["weight"].grad
    add(reducer, list(range(12)), last=True)
    assert reducer.reduce()[1] == 0
    assert_same_bits(dict(reducer.parameters)["weight"].grad, first)


def test_a_stand_in_counts_for_nothing():
    reducer = collector()
    add(reducer, list(range(12)))
    reducer.weightless = True
    add(reducer, [3], last=True)
    (mean,), _ = reducer.reduce()
    assert_same_bits(dict(reducer.parameters)["weight"].grad, expected_weight_gradient())
    assert_same_bits(mean, exact_mean(UPSTREAM[:, 0]))


def test_without_a_single_item_everything_is_the_canonical_nan():
    reducer = collector()
    add(reducer, [], last=True)
    (mean,), _ = reducer.reduce()
    assert_same_bits(mean, torch.tensor(NAN))
    assert dict(reducer.parameters)["weight"].grad.view(torch.int32).eq(0x7FC00000).all()


def test_micro_batches_that_made_their_losses_unlike_are_refused():
    reducer = collector()
    with pytest.raises(UncoveredError, match="micro-batches of one step made their losses unlike"):
        for structure in (3, 3, 4):
            reducer.add_loss([part_of(torch.ones(3))], [[0]], structure)
            reducer.begin(0, last=structure == 4)
            reducer.end()


def test_a_parameter_that_is_not_known_is_refused():
    with pytest.raises(UncoveredError, match=r"shape \(2, 5\) that is not in the model"):
        collector().digits(torch.nn.Parameter(torch.zeros(2, 5)))


def test_a_gradient_that_was_not_announced_is_not_lost_quietly():
    reducer = collector(bucket_elements=1)
    add(reducer, [0], last=True)
    with pytest.raises(DetError, match="weight received a gradient after all"):
        reducer.digits(reducer.parameters[0][1])


def test_special_values_reach_the_gradient():
    reducer = collector()
    weight = dict(reducer.parameters)["weight"]
    x = torch.tensor([[INF, 1.0, NAN, 0.0]])
    for last in (False, True):
        reducer.add_loss([part_of(torch.ones(1))], [[0]], 7)
        reducer.begin(0, last=last)
        linear(x, weight, sink=reducer).backward(torch.tensor([[1.0, 0.0, -1.0]]))
        reducer.end()
    reducer.reduce()
    assert_same_bits(weight.grad, torch.tensor([[INF, 1.0, NAN, 0.0], [NAN, 0.0, NAN, 0.0], [-INF, -1.0, NAN, 0.0]]))


def test_groups_are_divided_by_their_own_denominators_and_added_in_their_order():
    reducer = collector()
    weight = reducer.parameters[0][1]
    reducer.expect(weight)
    total = MeanPart(item_digits(torch.ones(4)), count_digits(4), total=True)
    reducer.add_loss([part_of(torch.ones(7)), total], [[0], [1]], 7)
    for group, rows in ((0, [0, 1]), (1, [2, 3, 4])):
        reducer.begin(group, last=True)
        linear(X[rows], weight, sink=reducer).backward(UPSTREAM[rows])
        reducer.end()
    means, _ = reducer.reduce()
    assert_same_bits(weight.grad, expected_weight_gradient([0, 1], 7) + expected_weight_gradient([2, 3, 4], 1))
    assert [float(mean) for mean in means] == [1.0, 4.0]


# Buckets and memory


def test_buckets_hold_every_parameter_once_last_first_and_are_padded_for_their_parts():
    tensors = [torch.nn.Parameter(torch.zeros(n)) for n in (300, 5, 1000, 0, 7)]
    tensors.insert(2, torch.nn.Parameter(torch.zeros(9).bfloat16()))
    for most, parts in ((1, 1), (600, 3), (10**9, 4)):
        buckets = fill_buckets(tensors, most=most, parts=parts)
        assert [place for bucket in buckets for place in bucket.places] == [5, 4, 3, 2, 1, 0]
        for bucket in buckets:
            assert bucket.elements % (BLOCK * parts) == 0 < bucket.elements
            assert {tensors[place].dtype for place in bucket.places} == {bucket.dtype}
            ends = [o + tensors[p].numel() for p, o in zip(bucket.places, bucket.offsets, strict=True)]
            assert list(bucket.offsets[1:]) == ends[:-1] and ends[-1] <= bucket.elements


def test_a_bucket_of_nothing_has_a_block_so_that_its_exchange_is_like_any_other():
    (bucket,) = fill_buckets([torch.nn.Parameter(torch.zeros(0, 3))], most=1, parts=3)
    assert bucket.elements == 3 * BLOCK and bucket.offsets == (0,)


@pytest.mark.parametrize("gigabytes, mebi_elements", [(141, 20), (80, 11), (24, 3), (2, 1)])
def test_a_bucket_of_full_digits_takes_a_small_part_of_a_gpu(monkeypatch, gigabytes, mebi_elements):
    memory = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    elements = bucket_elements_for(torch.device("cuda", 0))
    assert elements == mebi_elements << 20
    assert elements == 1 << 20 or elements * 8 * NB <= memory.total_memory / 40


def test_full_digits_live_only_while_their_bucket_is_in_flight():
    """Eight layers, each in a bucket of its own: at most two of them are full digits at a time."""
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(8)]
    reducer = GradientReducer([(str(i), layer.weight) for i, layer in enumerate(layers)], means=1, bucket_elements=1)
    most = 0

    class Watching:
        def expect(self, parameter):
            reducer.expect(parameter)

        def digits(self, parameter):
            nonlocal most
            result = reducer.digits(parameter)
            most = max(most, sum(local.digits is not None for local in reducer._local.values()))
            return result

        def added(self, parameter):
            reducer.added(parameter)

    for last in (False, True):
        x = wide_values(5, 4, 64, spread=1)
        for layer in layers:
            reducer.expect(layer.weight)
            x = linear(x, layer.weight, sink=Watching())
        reducer.add_loss([part_of(torch.ones(4))], [[0]], 7)
        reducer.begin(0, last=last)
        x.sum().backward()
        reducer.end()
        assert 1 <= most <= 2 or reducer._exchange.levels
        most = 0
    reducer.reduce()
    gc.collect()
    assert reducer._local == {} and all(layer.weight.grad is not None for layer in layers)


# Several ranks


NAMES = ["a", "b", "c", "d"]
SHAPES = [(40, 33), (7,), (300, 2), (1, 1)]


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
    assert set(counts) == {3 * 4 * (8 if world_size == 4 else 5)}


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
