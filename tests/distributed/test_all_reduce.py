"""Sums over ranks: digits exactly, metrics with one rounding, at every world size and dealing of the parts."""

import math
import os
import re
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from det_lightning.distributed.all_reduce import det_all_reduce
from det_lightning.distributed.metric_reduce import reduce_metric
from det_lightning.errors import InputError
from det_lightning.ops.digits import det_finalize
from det_lightning.ops.gemm import det_gemm_partial
from det_lightning.ops.reduction import det_sum_partial
from tests.claims.processes import on_ranks
from tests.ops.exact_oracle import INF, NAN, any_patterns, exact_gemm, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits


def join(rank: int, world_size: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


X, W = any_patterns(1, 3, 40), any_patterns(2, 2, 40)


def digits_of_part(rank: int, world_size: int, port: int):
    """Each rank holds a third of K, empty for some; what all of them get, and whether its own digits stayed."""
    join(rank, world_size, port)
    first, last = (40 * part // world_size if world_size < 41 else 0 for part in (rank, rank + 1))
    own = det_gemm_partial(X[:, first:last], W[:, first:last])
    before = own.clone()
    total = det_all_reduce(own)
    pair = dist.new_group(list(range(min(2, world_size))))
    of_pair = det_all_reduce(own, pair) if rank < 2 else None
    assert torch.equal(own, before)
    return det_finalize(total), None if of_pair is None else det_finalize(of_pair)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_digits_add_up_exactly_over_ranks_and_groups(world_size):
    ranks = on_ranks(world_size, digits_of_part)
    for total, _ in ranks:
        assert_same_bits(total, exact_gemm(X, W))
    if world_size == 3:
        end = 40 * 2 // 3
        assert_same_bits(ranks[0][1], exact_gemm(X[:, :end], W[:, :end]))


def test_without_a_process_group_there_is_one_rank():
    digits = det_sum_partial(wide_values(1, 9))
    total = det_all_reduce(digits)
    assert total is not digits and torch.equal(total, digits)


@pytest.mark.parametrize("wrong", [torch.zeros(21), torch.zeros(21, dtype=torch.int32), [0] * 21])
def test_what_is_not_digits_is_refused(wrong):
    with pytest.raises(InputError, match="int64 digits"):
        det_all_reduce(wrong)


# Metrics

VALUES = torch.tensor([[1e8, 1.0, NAN, 3e38, -0.0, 2.0**-149], [-1e8, 2.0, 1.0, 3e38, -0.0, 2.0**-149],
                       [0.25, 4.0, 1.0, 3e38, -0.0, 0.0]])  # fmt: skip
COUNTS = [5, 4, 4]
DOUBLES = [[1e16, 1.0, -1e16], [INF, -INF, 1.0], [1e308, 1e308, -1e308], [1e308] * 3, [0.1, 0.2, 0.4]]


def metrics(rank: int, world_size: int, port: int):
    join(rank, world_size, port)
    value, count = VALUES[rank], torch.tensor(COUNTS[rank])
    doubles = torch.tensor([column[rank] for column in DOUBLES], dtype=torch.float64)
    results = {
        "mean": reduce_metric(value, None, "mean"),
        "AVG": reduce_metric(value, None, dist.ReduceOp.AVG),
        "sum": reduce_metric(value, None, "sum"),
        "SUM": reduce_metric(value, None, dist.ReduceOp.SUM),
        "none": reduce_metric(value, None, None),
        "max": reduce_metric(value[:2], None, "max"),
        "min": reduce_metric(value[:2], None, dist.ReduceOp.MIN),
        "count": reduce_metric(count, None, "mean"),
        "counts": reduce_metric(count, None, "sum"),
        "votes": reduce_metric(torch.tensor(rank != 1), None, "sum"),
        "half": reduce_metric(value[:2].bfloat16(), None, "mean"),
        "double": reduce_metric(doubles, None, "mean"),
        "scalar": reduce_metric(torch.tensor(float(rank)), None, "mean"),
        "strided": reduce_metric(VALUES.t()[:2, rank], None, "sum"),
    }
    assert torch.equal(value.isnan(), VALUES[rank].isnan()), "the argument is not touched"
    return results


@pytest.fixture(scope="module")
def reduced():
    ranks = on_ranks(3, metrics)
    for name, value in ranks[0].items():
        for other in ranks[1:]:
            assert_same_bits(other[name], value)
    return ranks[0]


def exact(denominator: int, columns=slice(None)) -> torch.Tensor:
    patterns = [
        rounded([t if not math.isfinite(t) else Fraction(t) for t in column], torch.float32, denominator)
        for column in VALUES.double().t().tolist()[columns]
    ]
    return from_patterns(patterns, (len(patterns),), torch.float32)


def test_float_means_and_sums_are_exact_and_rounded_once(reduced):
    assert_same_bits(reduced["mean"], exact(3))
    assert_same_bits(reduced["AVG"], exact(3))
    for name in ("sum", "SUM", "none"):
        assert_same_bits(reduced[name], exact(1))
    assert_same_bits(reduced["strided"], exact(1)[:2])
    assert_same_bits(reduced["scalar"], torch.tensor(1.0))
    assert_same_bits(reduced["half"], torch.tensor([1 / 12, 7 / 3]).bfloat16())


def test_stock_float_sums_fail_the_same_check():
    stock = VALUES[0] + VALUES[1] + VALUES[2]
    other = VALUES[0] + (VALUES[1] + VALUES[2])
    assert stock[0] != other[0], "the sum depends on its order"
    assert exact(3)[3].isfinite() and stock[3].isinf()


def test_maximum_and_minimum(reduced):
    assert reduced["max"].tolist() == [1e8, 4.0]
    assert reduced["min"].tolist() == [-1e8, 1.0]


def test_a_mean_of_integers_is_not_truncated_and_a_sum_stays_an_integer(reduced):
    assert_same_bits(reduced["count"], torch.tensor(13 / 3))
    assert_same_bits(reduced["counts"], torch.tensor(13))
    assert bool(reduced["votes"])


def test_doubles_are_exact_too_and_infinities_do_not_stop_them(reduced):
    cancelling, special, *others = reduced["double"].tolist()
    assert cancelling == 1 / 3 != (1e16 + 1.0 - 1e16) / 3
    assert math.isnan(special)
    assert others == [float(sum(map(Fraction, column)) / 3) for column in DOUBLES[2:]]


REFUSED = {
    "median": (torch.ones(2), "reduce_op='median'.*allowed are mean, avg, sum"),
    "sum": (torch.ones(2, dtype=torch.complex64), "sum over ranks .* got torch.complex64"),
    "mean": (torch.ones(2).to(torch.float8_e4m3fn), "mean over ranks .* got torch.float8_e4m3fn"),
    "max": (torch.ones(2, dtype=torch.int16), "max over ranks .* got torch.int16"),
    "band": (torch.ones(2), "band over ranks .* got torch.float32"),
}


def refusals(rank: int, world_size: int, port: int) -> dict[str, str]:
    join(rank, world_size, port)
    messages = {}
    for operation, (value, _) in REFUSED.items():
        with pytest.raises(InputError) as raised:
            reduce_metric(value, None, operation)
        messages[operation] = str(raised.value)
    assert reduce_metric(torch.ones(2, dtype=torch.int16), None, "sum").dtype is torch.int16
    dist.get_backend = lambda group: "nccl"  # of this process alone
    with pytest.raises(InputError, match="NCCL reduces tensors on GPUs; got one on cpu"):
        reduce_metric(torch.ones(2), None, "sum")
    return messages


def test_what_cannot_be_reduced_is_refused_by_name():
    messages = on_ranks(1, refusals)[0]
    for operation, (_, message) in REFUSED.items():
        assert re.search(message, messages[operation])


def test_outside_a_process_group_a_metric_is_its_own_mean():
    value = torch.tensor([1.0, NAN])
    assert reduce_metric(value, None, "mean") is value
