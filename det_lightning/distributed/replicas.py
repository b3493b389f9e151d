"""Whether all ranks hold the same weights: digests of every tensor, compared after each optimizer step.

With exact arithmetic replicas cannot drift, so a difference means a fault: a flipped bit, a rank's own random state, a
tensor that somebody changed on one rank.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from det_lightning.distributed.waiting import other_ranks
from det_lightning.errors import DetError
from det_lightning.kernels.dispatch import tensor_lanes


def check_replicas(
    named: Sequence[tuple[str, torch.Tensor]], when: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raises DetError with ranks and tensor where a tensor is not the same bytes on all ranks of a process group.

    Args:
        named: (name, tensor), the same names in the same order on every rank.
        when: for the message.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    lanes = [tensor_lanes(tensor.detach()) for _, tensor in named]
    root = blake2b(repr(lanes).encode(), digest_size=8).digest()
    roots = _gathered([[int.from_bytes(root, signed=True)]], group)
    if len({tuple(map(tuple, each)) for each in roots}) == 1:
        return
    tables = _gathered([[lane - 2**64 if lane >= 2**63 else lane for lane in pair] for pair in lanes], group)
    for place, (name, tensor) in enumerate(named):
        values = [tuple(table[place]) for table in tables]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        unlike = [rank for rank, value in enumerate(values) if value != usual]
        who = f"rank {unlike[0]} differs" if len(unlike) == 1 < len(values) - 1 else f"ranks {[0, *unlike]} differ"
        raise DetError(
            f"{who} from the others in {name} {list(tensor.shape)} {when}. Under exact arithmetic replicas cannot "
            f"drift: a bit was flipped, or code changed this tensor on some ranks only. Resume from the last checkpoint."
        )


def _gathered(rows: list[list[int]], group: dist.ProcessGroup | None) -> list[list[list[int]]]:
    """Every rank's table of 64-bit integers."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    tables = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with other_ranks("weights were compared over the ranks"):
        dist.all_gather(tables, mine, group=group)
    return [table.tolist() for table in tables]
