"""Digests of the things a run computes with: tensors (on their device, the same for every sharding) and
samples.

`root`, the digest of many named tensors, is defined in `record` and repeated here because callers want the
three together.
"""

from __future__ import annotations

import pickle
import struct
import sys
from functools import lru_cache
from typing import Any

import numpy
import torch
from blake3 import blake3

from det_lightning.errors import InputError
from det_lightning.kernels.dispatch import tensor_lanes
from det_lightning.ledger.record import root

__all__ = ["root", "tensor_digest", "value_digest"]

_LANE = (1 << 64) - 1


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """16 bytes that depend on dtype, shape and the bits of every element at its place; not on strides, device
    or sharding.

    (lane0 + k0, lane1 + k1) modulo 2^64, little-endian, where the lanes are sums over the words of the tensor
    (arithmetic/tensor_digest) and the keys k0, k1 are the first 16 bytes of BLAKE3("<dtype>|<sizes joined by
    ,>").
    """
    return digest_of_lanes(tensor.dtype, tensor.shape, *tensor_lanes(tensor))


def digest_of_lanes(dtype: torch.dtype, shape: torch.Size, lane0: int, lane1: int) -> bytes:
    """The tensor digest of a tensor of this type whose lanes are known already."""
    key0, key1 = _key(dtype, tuple(shape))
    return struct.pack("<QQ", (lane0 + key0) & _LANE, (lane1 + key1) & _LANE)


@lru_cache(maxsize=4096)
def _key(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    name = str(dtype).removeprefix("torch.")
    return struct.unpack("<QQ", blake3(f"{name}|{','.join(map(str, shape))}".encode()).digest()[:16])


def value_digest(value: Any) -> int:
    """64-bit digest of one sample: nested lists, tuples, dicts and sets of tensors, arrays, numbers, text,
    bytes and None.

    Types and order count, except the order of a dict or a set. Any other object is digested by its pickle,
    which must then be the same in every process. Raises InputError if an object cannot be pickled or contains
    itself.
    """
    try:
        return int.from_bytes(_encoding(value)[:8], "little")
    except RecursionError:
        raise InputError(
            "a sample contains itself or is nested too deeply to be digested; return plain tensors or arrays"
        ) from None


def _encoding(value: Any) -> bytes:
    """32 bytes for `value`: BLAKE3 over a tag of its type and either its own bytes or the encodings of its
    parts.
    """
    if value is None or isinstance(value, (bool, int, str, bytes, bytearray)):
        return _hash(
            type(value).__name__,
            value if isinstance(value, (bytes, bytearray)) else str(value).encode("utf-8", "surrogatepass"),
        )
    if isinstance(value, float):
        return _hash("float", struct.pack("<d", value) if value == value else b"nan")
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return _hash(f"tensor {name} {tuple(value.shape)}", tensor_digest(value))
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return _array_encoding(numpy.asarray(value))
    if isinstance(value, (list, tuple)):
        return _hash("list" if isinstance(value, list) else "tuple", *map(_encoding, value))
    if isinstance(value, dict):
        return _hash("dict", *sorted(_encoding(key) + _encoding(item) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return _hash("set", *sorted(map(_encoding, value)))
    return _pickle_encoding(value)


def _array_encoding(array: numpy.ndarray) -> bytes:
    if array.dtype.hasobject:
        return _hash(f"objects {array.shape}", *map(_encoding, array.reshape(-1).tolist()))
    if array.dtype.kind in "biufcMmUS" and (array.dtype.byteorder == ">" or sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return _hash(f"array {array.dtype.descr} {array.shape}", numpy.ascontiguousarray(array).tobytes())


def _pickle_encoding(value: Any) -> bytes:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        return _hash(kind, pickle.dumps(value, protocol=5))
    except RecursionError:
        raise
    except Exception as error:
        raise InputError(
            f"a sample holds a {kind}, which cannot be digested ({type(error).__name__}: {error}); return "
            "tensors, arrays, numbers or text"
        ) from error


def _hash(tag: str, *parts: bytes) -> bytes:
    hasher = blake3()
    for part in (tag.encode("utf-8"), *parts):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.digest()
