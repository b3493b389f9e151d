"""The reducer: gradients are exact sums over everything that was added, divided once by the exact number of items."""

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed import local_sum
from det_lightning.distributed.buckets import BLOCK, bucket_elements_for, fill_buckets
from det_lightning.distributed.local_sum import LocalSum
from det_lightning.distributed.reducer import GradientReducer, MeanPart
from det_lightning.errors import DetError, UncoveredError
from det_lightning.layers.loss_calls import count_digits
from det_lightning.ops.digits import det_finalize
from det_lightning.ops.gemm import det_gemm_partial
from det_lightning.ops.linear import DigitSink, linear
from det_lightning.ops.loss import exact_mean
from det_lightning.ops.means import item_digits
from det_lightning.ops.reduction import det_sum_partial
from tests.distributed.collected import UPSTREAM, X, add, collector, expected_weight_gradient, part_of
from tests.ops.exact_oracle import INF, NAN, wide_values
from tests.same_bits import assert_same_bits


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


def test_matrices_of_whole_blocks_stand_apart_before_all_others():
    shapes = [(3,), (2, 512), (40, 256), (8, 300), (0, 256), (6, 256)]
    tensors = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    (bucket,) = fill_buckets(tensors, most=10**9, parts=2, least_apart=1024)
    assert bucket.places == (5, 4, 3, 2, 1, 0) and bucket.apart == ((6, 256), (40, 256), (2, 512))
    assert bucket.offsets == (0, 12800, 12800, 1536, 11776, 15200) and bucket.elements == 15360
    assert fill_buckets(tensors, most=10**9, parts=2)[0].apart == ()


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


def test_full_digits_live_only_while_their_bucket_is_in_flight(monkeypatch):
    """Eight layers, each in a bucket of its own: at most two of them are full digits at a time."""
    monkeypatch.setattr(local_sum, "KEPT_ELEMENTS", 64 * 64 - 1)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(8)]
    reducer = GradientReducer([(str(i), layer.weight) for i, layer in enumerate(layers)], means=1, bucket_elements=1)
    most = 0

    class Watching(DigitSink):
        def expect(self, parameter):
            reducer.expect(parameter)

        def digits(self, parameter):
            nonlocal most
            result = reducer.digits(parameter)
            parts = [part for local in reducer._local.values() for part in local.parts]
            most = max(most, sum(part.digits is not None for part in parts))
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


@pytest.mark.parametrize("least_apart", [None, 1])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("columns", [256, 200])
def test_products_in_windows_are_those_in_full_digits(least_apart, special, columns, monkeypatch):
    """Beside digits of the same matrix, as a tied embedding leaves them, and others of its bucket."""
    weight, bias = torch.nn.Parameter(torch.zeros(6, columns)), torch.nn.Parameter(torch.zeros(6))
    x, upstream, seen = (wide_values(5 + i, *shape) for i, shape in enumerate([(12, columns), (12, 6), (6, columns)]))
    if special:
        x[7, 3], upstream[2, 4] = INF, NAN
    digits = det_gemm_partial(upstream.t(), x.t()) + det_gemm_partial(seen, torch.eye(columns))
    wanted, sums = det_finalize(digits, denominator=12), det_sum_partial(upstream, dim=0)
    reducer = GradientReducer([("weight", weight), ("bias", bias)], means=1, least_apart=least_apart)
    opened, open_digits = [], LocalSum.open
    monkeypatch.setattr(LocalSum, "open", lambda part: opened.append(part.rows) or open_digits(part))
    for first, last in ((0, 1), (1, 5), (5, 12)):
        uses = [weight, bias] + ([weight] if first == 1 else [])
        for each in uses:
            reducer.expect(each)
        reducer.add_loss([part_of(torch.ones(last - first))], [[0]], 7)
        reducer.begin(0, last=last == 12)
        if first == 1:
            reducer.digits(weight).add_(det_gemm_partial(seen, torch.eye(columns)))
            reducer.added(weight)
        linear(x[first:last], weight, bias, sink=reducer).backward(upstream[first:last])
        reducer.end()
    reducer.reduce()
    assert opened.count(6) == (1 if least_apart and columns == 256 else 0), (
        "products of the matrix apart open no digits"
    )
    assert_same_bits(weight.grad, wanted)
    assert_same_bits(bias.grad, det_finalize(sums, denominator=12))
