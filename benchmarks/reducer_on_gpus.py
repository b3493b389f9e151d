"""Times the exact exchange of a gradient between GPUs beside NCCL's float32 all-reduce of it.

`python benchmarks/reducer_on_gpus.py [COMMIT] [--profile]`, on a machine with two GPUs or more. 126 million elements, as
in a small GPT: agreement on windows, reduce-scatter of their words, division, one rounding, all-gather of float32.
"""

import sys
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks.surroundings import RESULTS, keep, output_of, surroundings  # noqa: E402
from det_lightning.distributed.buckets import BLOCK, bucket_elements_for  # noqa: E402
from det_lightning.distributed.exchange import Exchange, all_gather, reduce_scatter  # noqa: E402
from det_lightning.distributed.waiting import wait  # noqa: E402
from det_lightning.ops.window_agreement import agreed_window  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits  # noqa: E402
from det_lightning.strategies.given_ranks import free_port  # noqa: E402

ELEMENTS, REPEATS = 120 << 20, 9


def milliseconds(run, *arguments) -> float:
    """One run on all ranks, from a common start, by CUDA events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    run(*arguments)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def stages(exchange: Exchange, needs: torch.Tensor, words: torch.Tensor):
    """What a bucket goes through in a training once its digits are words, the agreement on the window included."""
    agreed = needs.clone()
    yield exchange.add(agreed, largest=True)
    base, facts = agreed_window(agreed)
    _, _, minus_lowest, highest = facts.tolist()
    edges = (-minus_lowest, highest)
    return (yield from exchange.word_stages(words, base, edges, lambda: Fraction(24), torch.float32))


def exchange_all(exchange: Exchange, buckets: list[tuple], gradients: list) -> None:
    """All buckets, each stage of one behind the same stage of the one before."""
    running = {place: stages(exchange, *bucket) for place, bucket in enumerate(buckets)}
    works = dict.fromkeys(running)
    while running:
        for place in list(running):
            wait(works[place])
            try:
                works[place] = next(running[place])
            except StopIteration as finished:
                gradients[place] = finished.value
                del running[place]


def move_alone(buckets: list[tuple], gradients: list[torch.Tensor]) -> None:
    """NCCL's part of the exchange and nothing else: what no arithmetic could be faster than."""
    works = []
    for _, words in buckets:
        works.append(reduce_scatter(torch.empty_like(words[0]), words, async_op=True))
    for gradient in gradients:
        works.append(
            all_gather(torch.empty_like(gradient), gradient[: len(gradient) // dist.get_world_size()], async_op=True)
        )
    for work in works:
        work.wait()


def random_bucket(exchange: Exchange, elements: int, words: int, generator: torch.Generator) -> tuple:
    """(needs, words) of a window on base -90."""
    blocks = elements // BLOCK
    room = exchange.room_for(blocks, words, torch.device("cuda"))
    room.random_(-(2**25), 2**25, generator=generator)
    needs = torch.tensor([26 * words - 90, 90, 0], device="cuda").repeat_interleave(
        torch.tensor([blocks, blocks, 1], device="cuda")
    )
    return needs, room


def check_first(words: torch.Tensor, found: torch.Tensor, world: int) -> None:
    """The first bucket's gradients against words that were added up by nothing but torch."""
    whole = [torch.empty_like(words) for _ in range(world)]
    dist.all_gather(whole, words)
    for share, of_share in zip(found.view(len(words), -1), sum(whole[1:], whole[0].clone()), strict=True):
        base = torch.full((of_share.shape[1],), -90, device="cuda")
        expected = WindowedDigits(base, of_share, states=world).round(denominator=24)
        assert torch.equal(expected.view(-1), share), "the exchange rounded something else"


def profile(exchange: Exchange, buckets: list[tuple], gradients: list) -> None:
    """Where one exchange of everything spends its time, on the GPU and on the host."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        milliseconds(exchange_all, exchange, buckets, gradients)
    for order in ("self_cuda_time_total", "self_cpu_time_total"):
        print(found.key_averages().table(sort_by=order, row_limit=14, max_name_column_width=60), flush=True)


def measure(rank: int, world: int, port: int, profiled: bool, result: dict) -> None:
    """Rank 0 writes the result after each row."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device)
    plain = torch.randn(ELEMENTS, device="cuda")
    exchange, rows = Exchange(), result["rows"]
    for words, elements in product((3, 4), (bucket_elements_for(device), 8 << 20)):
        generator = torch.Generator("cuda").manual_seed(rank)
        buckets = [random_bucket(exchange, elements, words, generator) for _ in range(ELEMENTS // elements)]
        gradients: list = [None] * len(buckets)
        times = []
        for repeat in range(REPEATS + 2):
            ours = milliseconds(exchange_all, exchange, buckets, gradients)
            stock = milliseconds(dist.all_reduce, plain)
            alone = milliseconds(move_alone, buckets, gradients)
            plain.normal_()
            if repeat > 1:
                times.append((ours, stock, alone))
        check_first(buckets[0][1], gradients[0], world)
        if profiled and rank == 0:
            profile(exchange, buckets, gradients)
        elif profiled:
            milliseconds(exchange_all, exchange, buckets, gradients)
        rows.append(
            {
                "work": f"exact sum over {world} GPUs of {ELEMENTS >> 20} Mi gradient elements, {words} words, "
                f"buckets of {elements >> 20} Mi",
                "ratio": round(median(ours / stock for ours, stock, _ in times), 2),
                "against": "NCCL all_reduce float32",
                "ours_ms": round(median(ours for ours, _, _ in times), 3),
                "stock_ms": round(median(stock for _, stock, _ in times), 3),
                "moving_alone_ms": round(median(alone for _, _, alone in times), 3),
                "target": {3: 2.5, 4: 3.2}[words],
            }
        )
        if rank == 0:
            keep(RESULTS / "reducer-on-gpus.json", result)
            row = rows[-1]
            print(
                f"{row['work']}: {row['ratio']} x {row['against']} ({row['ours_ms']} ms; aim {row['target']})",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--profile"]
    world = torch.cuda.device_count()
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    result = surroundings(
        f"{world} x {torch.cuda.get_device_name(0)}",
        commit=words[0] if words else None,
        driver=driver[0] if driver else "unknown",
    )
    mp.spawn(measure, (world, free_port(), "--profile" in sys.argv, result | {"rows": []}), nprocs=world)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
