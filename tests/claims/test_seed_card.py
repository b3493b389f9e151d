"""The claims of the card of det-train, the kernel this project started from, one test each.

The first paragraph of a test's docstring is the claim, as the README's table prints it (benchmarks/readme_tables.py). Every
claim about bits has a negative control: plain float32 fails the same check.
"""

import hashlib
import math
import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from det_lightning import DetLinear, det_all_reduce, det_combine, det_finalize, det_gemm, det_gemm_partial, det_sum
from det_lightning.arithmetic.formats import NB
from tests.claims.processes import on_ranks
from tests.ops.exact_oracle import exact_gemm, wide_values
from tests.same_bits import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_each_format = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


def operands(m: int, k: int, n: int, device: str, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    return x.to(dtype).to(device), w.to(dtype).to(device)


def shards(x: torch.Tensor, w: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """The digits of the parts of K between neighbouring cuts."""
    return [det_gemm_partial(x[:, a:b], w[:, a:b]) for a, b in pairwise(cuts)]


def even_cuts(k: int, parts: int) -> list[int]:
    return [k * part // parts for part in range(parts + 1)]


@on_each_device
def test_the_api_of_the_card(device):
    """`det_gemm`, `det_gemm_partial`, `det_combine`, `det_finalize`, `det_all_reduce`, `det_sum`, `DetLinear` as listed"""
    x, w = operands(3, 50, 4, device)
    digits = det_gemm_partial(x, w)
    assert digits.shape == (3, 4, NB) and digits.dtype is torch.int64
    y = det_gemm(x, w)
    assert y.shape == (3, 4) and y.dtype is torch.float32
    assert_same_bits(y, exact_gemm(x.cpu(), w.cpu()).to(device))
    assert_same_bits(det_finalize(det_all_reduce(det_combine([digits]))), y)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert_same_bits(det_sum(x[:, order], dim=1), det_sum(x, dim=1))
    layer = DetLinear(50, 4, bias=False, device=device)
    layer(x).square().mean().backward()
    gradient = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(x).square().mean().backward()
    assert_same_bits(layer.weight.grad, gradient)


@on_each_device
@in_each_format
@pytest.mark.parametrize("parts", [2, 4, 8, 16])
def test_shards_of_k_and_any_grouping_compose(parts, dtype, device):
    """K cut 2, 4, 8 and 16 ways, folded in any grouping, equals the whole product, bit for bit, in bfloat16 and float32"""
    x, w = operands(9, 1000, 7, device, dtype)
    whole = det_gemm(x, w)
    pieces = shards(x, w, even_cuts(1000, parts))
    chain = pieces[0]
    for piece in pieces[1:]:
        chain = det_combine([chain, piece])
    tree = pieces
    while len(tree) > 1:
        tree = [det_combine(tree[i : i + 2]) for i in range(0, len(tree), 2)]
    for folded in (chain, tree[0], det_combine(pieces[::-1]), det_combine([det_combine(pieces[::2]), *pieces[1::2]])):
        assert_same_bits(det_finalize(folded), whole)
    # float32 sums of the shards' products are another number, and depend on the grouping.
    products = [x[:, a:b].float() @ w[:, a:b].float().t() for a, b in pairwise(even_cuts(1000, parts))]
    assert not torch.equal(sum(products), whole)


@on_each_device
@in_each_format
def test_boundaries_of_shards_are_arbitrary(dtype, device):
    """Shard boundaries are arbitrary: any partition of K composes"""
    x, w = operands(5, 700, 6, device, dtype)
    whole = det_gemm(x, w)
    for cuts in ([0, 1, 700], [0, 0, 350, 350, 699, 700], [0, 17, 18, 300, 700], list(range(0, 701, 70))):
        assert_same_bits(det_finalize(det_combine(shards(x, w, cuts))), whole)


def reduced_over_ranks(rank: int, world_size: int, port: int, backend: str) -> tuple[str, torch.Tensor]:
    """One shard of K a rank, digits summed by one all-reduce: the SHA-256 of the result, and the result."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    x, w = operands(16, 999, 12, str(device))
    cuts = even_cuts(999, world_size)
    own = slice(cuts[rank], cuts[rank + 1])
    result = det_finalize(det_all_reduce(det_gemm_partial(x[:, own], w[:, own]))).cpu()
    dist.destroy_process_group()
    return hashlib.sha256(result.numpy().tobytes()).hexdigest(), result


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.cuda, pytest.mark.multi_gpu])])
def test_one_all_reduce_of_digits_equals_one_process(backend):
    """A K-sharded product reduced over processes by one int64 all-reduce equals one process, every rank the same digest"""
    x, w = operands(16, 999, 12, "cpu")
    whole = det_gemm(x, w)
    digests = set()
    for world_size in (1, 2):
        for digest, result in on_ranks(world_size, reduced_over_ranks, backend):
            digests.add(digest)
            assert_same_bits(result, whole)
    assert len(digests) == 1


@on_each_device
def test_results_are_exact_sums_rounded_once(device):
    """Results carry the exact sum of products, rounded once to float32, whatever the exponents in a row"""
    x, w = wide_values(1, 6, 80), wide_values(2, 5, 80)
    assert_same_bits(det_gemm(x.to(device), w.to(device)).cpu(), exact_gemm(x, w))
    # 2^127 and 2^-149 in one row: there is no window that the sum could fall out of.
    x = torch.tensor([[2.0**127, 2.0**-149, -(2.0**127)]], device=device)
    w = torch.ones(1, 3, device=device)
    assert det_gemm(x, w).item() == 2.0**-149
    assert x.double().cumsum(1)[0, -1].item() == 0.0


@on_each_device
@in_each_format
def test_accuracy_is_at_the_rounding_floor_of_float32(dtype, device):
    """The relative error against a float64 product is at most that of one rounding to float32"""
    x, w = operands(64, 4096, 48, device, dtype)
    x, w = x.abs(), w.abs()  # no cancellation, so that the float64 product is good to 2^-42
    reference = x.double() @ w.double().t()
    error = ((det_gemm(x, w).double() - reference).abs() / reference).max().item()
    assert error <= 2.0**-24 * (1 + 2.0**-10)
    stock = ((x.float() @ w.float().t()).double() - reference).abs() / reference
    assert stock.max().item() > 2.0**-24 * (1 + 2.0**-10)


@on_each_device
def test_repeated_runs_are_identical(device):
    """Repeated runs are bitwise identical"""
    x, w = operands(30, 2000, 20, device)
    first = det_gemm(x, w)
    for _ in range(3):
        assert_same_bits(det_gemm(x.clone(), w.clone()), first)


class ShardedProduct(torch.autograd.Function):
    """x w^T with K cut into parts: digits of the parts forward; backward each part's own gradients."""

    @staticmethod
    def forward(ctx, x, w, parts):
        ctx.save_for_backward(x, w)
        ctx.cuts = even_cuts(x.shape[1], parts)
        return det_finalize(det_combine(shards(x, w, ctx.cuts)))

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        ends = list(pairwise(ctx.cuts))
        of_x = [det_gemm(upstream, w[:, a:b].t()) for a, b in ends]
        of_w = [det_gemm(upstream.t(), x[:, a:b].t()) for a, b in ends]
        return torch.cat(of_x, dim=1), torch.cat(of_w, dim=1), None


def stock_product(x: torch.Tensor, w: torch.Tensor, parts: int) -> torch.Tensor:
    return sum(x[:, a:b] @ w[:, a:b].t() for a, b in pairwise(even_cuts(x.shape[1], parts)))


def training(product, parts: int, device: str, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final weights of a small network, its products cut into `parts` over K."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(24, 48, generator=generator) * 0.2, torch.randn(4, 24, generator=generator) * 0.2]
    weights = [weight.to(device).requires_grad_() for weight in weights]
    x, target = torch.randn(16, 48, generator=generator).to(device), torch.randn(16, 4, generator=generator).to(device)
    losses = []
    for _ in range(steps):
        hidden = product(x, weights[0], parts).relu()
        loss = (product(hidden, weights[1], parts) - target).square().mean()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.1 * gradient
        losses.append(loss.item())
    return losses, [weight.detach() for weight in weights]


@on_each_device
def test_a_training_of_160_steps_sharded_and_not(device):
    """160 training steps, 4-way K-sharded and unsharded: losses differ by exactly zero at every step, equal weights"""
    losses, weights = training(ShardedProduct.apply, 1, device, 160)
    sharded_losses, sharded_weights = training(ShardedProduct.apply, 4, device, 160)
    assert [a - b for a, b in zip(losses, sharded_losses, strict=True)] == [0.0] * 160
    for a, b in zip(weights, sharded_weights, strict=True):
        assert_same_bits(a, b)
    assert losses[-1] < losses[0] / 2
    stock, sharded_stock = training(stock_product, 1, device, 160), training(stock_product, 4, device, 160)
    assert any(a != b for a, b in zip(stock[0], sharded_stock[0], strict=True))


@on_each_device
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def test_the_limits_of_the_card_are_lifted(dtype, device):
    """The card's limits are lifted: K beyond 2^19 in one call, and float16 beside bfloat16 and float32"""
    k = (1 << 19) + 3
    x, w = operands(2, k, 1, device, dtype)
    products = (x[0].double() * w[0].double()).tolist()  # exact, and so is their fsum but for its one rounding
    assert abs(det_gemm(x, w)[0, 0].item() - math.fsum(products)) <= abs(math.fsum(products)) * 2.0**-24 * (
        1 + 2.0**-20
    )
    assert_same_bits(det_finalize(det_combine(shards(x, w, even_cuts(k, 5)))), det_gemm(x, w))
