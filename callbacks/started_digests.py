"""Digests of many tensors that may still be under way while the training goes on."""

from collections.abc import Mapping

import torch
from det_lightning.callbacks.pieces import Piece
from det_lightning.callbacks.shards import Shards

from det_lightning.errors import InputError
from det_lightning.kernels.dispatch import many_lanes, unrecorded
from det_lightning.ledger.digest import digest_of_lanes


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """name -> tensor digest (16 bytes), now; every tensor is whole."""
    return StartedDigests.of_whole(tensors).result()


class StartedDigests:
    """Digests that were asked for. What lies on a CUDA device is digested there, in the order of its stream, in one launch,
    and fetched in one copy; later changes of the tensors are not seen. CPU tensors are digested at once.

    pieces: of this rank. shards: given if ranks hold parts of tensors; then making one is collective, and the digests are
    those of the whole tensors.

    Raises InputError for a part of a tensor without `shards`.
    """

    def __init__(self, pieces: Mapping[str, Piece], shards: Shards | None = None):
        self._ready: dict[str, bytes] = {}
        self._waiting: list[tuple[list[tuple[str, torch.dtype, torch.Size]], Fetched]] = []
        if shards is not None:
            self._start_sharded(pieces, shards)
            return
        by_device: dict[torch.device, list[tuple[str, Piece]]] = {}
        for name, piece in pieces.items():
            if piece.sharded:
                raise InputError(f"{name} is sharded over the ranks: this rank alone cannot digest it")
            by_device.setdefault(piece.tensor.device, []).append((name, piece))
        for named in by_device.values():
            lanes = many_lanes([piece.tensor for _, piece in named])
            self._waiting.append(([(name, each.tensor.dtype, each.shape) for name, each in named], Fetched(lanes)))

    @classmethod
    def of_whole(cls, tensors: Mapping[str, torch.Tensor]) -> "StartedDigests":
        """Of tensors that this rank holds whole. Raises InputError for a DTensor."""
        for name, tensor in tensors.items():
            if type(tensor).__name__ == "DTensor":
                raise InputError(
                    f"{name} is a DTensor, of which a rank holds a part; give its local tensor or the full one"
                )
        with unrecorded():
            return cls({name: Piece(tensor.detach(), tensor.shape) for name, tensor in tensors.items()})

    def _start_sharded(self, pieces: Mapping[str, Piece], shards: Shards) -> None:
        slots = shards.slots(pieces)
        for device_type in sorted({slot.device_type for slot in slots}):
            here = [slot for slot in slots if slot.device_type == device_type]
            given = [pieces[slot.name] if slot.given and pieces[slot.name].counted else None for slot in here]
            devices = {piece.tensor.device for piece in given if piece is not None}
            nothing = torch.empty(0, device=devices.pop() if devices else device_type)
            lanes = many_lanes(
                [nothing if piece is None else piece.tensor for piece in given],
                [None if piece is None else piece.place for piece in given],
            )
            shards.add(lanes)
            self._waiting.append(([(slot.name, slot.dtype, slot.shape) for slot in here], Fetched(lanes)))

    def result(self) -> dict[str, bytes]:
        """name -> tensor digest; waits for the device if need be."""
        for kinds, fetched in self._waiting:
            with unrecorded():
                lanes = fetched.tensor().tolist()
            for (name, dtype, shape), (first, second) in zip(kinds, lanes, strict=True):
                self._ready[name] = digest_of_lanes(dtype, shape, first, second)
        self._waiting = []
        return self._ready


class Fetched:
    """A tensor on its way to the CPU."""

    def __init__(self, tensor: torch.Tensor):
        self._event = None
        with unrecorded():
            self._tensor = tensor = tensor.detach()
            if tensor.is_cuda:
                self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._tensor.copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(tensor.device))

    def tensor(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensor
