"""Random numbers belong to a sample's coordinates: no batch, padding or neighbour changes them."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from det_lightning.distributed.random_bits import philox
from det_lightning.errors import InputError
from det_lightning.ops.philox import derived_key, philox_words
from det_lightning.ops.random_values import dropout, integers, normal, sample_words, uniform
from tests.ops.exact_oracle import INF, NAN, wide_values
from tests.same_bits import assert_same_bits

POSITIONS = torch.tensor([7, 3, 2**32 - 1, 0])
KEY = 0x1234567890ABCDEF


def test_the_definition_word_by_word():
    words = sample_words(KEY, POSITIONS, (2, 3, 6))
    for n, position in enumerate(POSITIONS.tolist()):
        for c3, c2, c1 in np.ndindex(2, 3, 6):
            counter = np.array([c1 // 4, c2, c3, position], dtype=np.uint32)
            assert words[n, c3, c2, c1] == int(philox(KEY, counter)[c1 % 4])
    assert derived_key(KEY, 1, 2, 3, 4) == sum(
        int(word) << 32 * i for i, word in enumerate(philox(KEY, np.array([1, 2, 3, 4], dtype=np.uint32))[:2])
    )
    assert derived_key(KEY, 5) == derived_key(KEY, 5, 0, 0, 0) != derived_key(KEY, 6)


@pytest.mark.parametrize("shape", [(), (1,), (9,), (3, 5), (2, 3, 4)])
def test_neither_batch_nor_padding_moves_a_word(shape):
    whole = sample_words(KEY, POSITIONS, shape)
    for n in range(len(POSITIONS)):
        assert torch.equal(sample_words(KEY, POSITIONS[n : n + 1], shape)[0], whole[n])
    padded = sample_words(KEY, POSITIONS, tuple(size + 3 for size in shape))
    assert torch.equal(padded[(slice(None), *(slice(0, size) for size in shape))], whole)
    assert len(set(whole.flatten().tolist())) == whole.numel(), "samples and places have words of their own"


def test_distributions():
    words = sample_words(KEY, torch.arange(100), (10, 100))
    u, z, k = uniform(words), normal(words), integers(words, -3, 4)
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005
    assert (k.min(), k.max()) == (-3, 3)
    assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01
    exact = [NormalDist().inv_cdf((w + 0.5) / 2**32) for w in words.flatten()[:2000].tolist()]
    assert np.abs(z.flatten()[:2000].numpy() - exact).max() < 2e-6
    extremes = torch.tensor([0, 1, 2**31, 2**32 - 1, round(0.075 * 2**32), round(0.925 * 2**32)])
    exact = [NormalDist().inv_cdf((w + 0.5) / 2**32) for w in extremes.tolist()]
    assert np.abs(normal(extremes).numpy() - exact).max() < 2e-6


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_and_scales_or_drops(p, dtype):
    x = wide_values(1, 64, 40, spread=1).to(dtype).requires_grad_()
    words = sample_words(KEY, torch.arange(64), (40,))
    out = dropout(x, words, p)
    upstream = wide_values(2, 64, 40, spread=1).to(dtype)
    out.backward(upstream)
    kept = words >= round(p * 2**32)
    scale = torch.tensor(1.0 / (1.0 - p) if p < 1 else 0.0)
    for result, source in ((out.detach(), x.detach()), (x.grad, upstream)):
        assert_same_bits(result, torch.where(kept, source.float() * scale, 0.0).to(dtype))
    assert abs(kept.float().mean() - (1 - p)) < 0.02


def test_what_is_dropped_leaves_nothing_behind():
    out = dropout(torch.tensor([NAN, INF, -INF, -1.0]), torch.zeros(4, dtype=torch.int64), 0.5)
    assert_same_bits(out, torch.zeros(4))


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"flatten\(1, 2\)"):
        sample_words(KEY, POSITIONS, (1, 1, 1, 1))
    with pytest.raises(InputError, match=r"p = 1\.5"):
        dropout(torch.ones(1), torch.ones(1, dtype=torch.int64), 1.5)
    with pytest.raises(InputError, match="range must hold"):
        integers(POSITIONS, 3, 3)
    with pytest.raises(InputError, match="outside"):
        philox_words(-1, (POSITIONS,) * 4)
