"""Times the exact exchange of a gradient between GPUs beside NCCL's float32 all-reduce of it.

`python benchmarks/reducer_on_gpus.py [COMMIT]`, on a machine with two GPUs or more. 124 million elements, as in a small
GPT: windowed digits by all-to-all, exact local sum, division, one rounding, all-gather of float32.
"""

import json
import sys
from fractions import Fraction
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks.surroundings import RESULTS, output_of, surroundings  # noqa: E402
from det_lightning.distributed.buckets import BLOCK  # noqa: E402
from det_lightning.distributed.exchange import Exchange  # noqa: E402
from det_lightning.distributed.waiting import wait  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits  # noqa: E402
from det_lightning.strategies.given_ranks import free_port  # noqa: E402

ELEMENTS, BUCKET, REPEATS = 124 << 20, 4 << 20, 9


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


def stages(exchange: Exchange, window: WindowedDigits):
    """What a bucket goes through in a training once its digits are in a window, the agreement on the window included."""
    used, high = torch.ones_like(window.base, dtype=torch.bool), window.base + 70
    agreed = torch.cat([high, -window.base, used[:1].long()])
    yield exchange.add(agreed, largest=True)
    base = -agreed[len(high) : -1]
    lowest, highest = torch.stack([base.min(), base.max()]).tolist()
    return (yield from exchange.word_stages(window.words, base, (lowest, highest), lambda: Fraction(24), torch.float32))


def exchange_all(exchange: Exchange, windows: list[WindowedDigits], gradients: list[torch.Tensor]) -> None:
    """All buckets, each stage of one behind the same stage of the one before."""
    running = {place: stages(exchange, window) for place, window in enumerate(windows)}
    works = dict.fromkeys(running)
    while running:
        for place in list(running):
            wait(works[place])
            try:
                works[place] = next(running[place])
            except StopIteration as finished:
                gradients[place] = finished.value
                del running[place]


def measure(rank: int, world: int, port: int, answers) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    plain = torch.randn(ELEMENTS, device="cuda")
    exchange, rows = Exchange(), []
    for words in (3, 4):
        shape = (BUCKET // BLOCK, BLOCK)
        generator = torch.Generator("cuda").manual_seed(rank)
        windows = [
            WindowedDigits(
                torch.full(shape[:1], -90, device="cuda"),
                torch.randint(-(2**25), 2**25, (words, *shape), generator=generator, dtype=torch.int32, device="cuda"),
            )
            for _ in range(ELEMENTS // BUCKET)
        ]
        gradients: list[torch.Tensor] = [plain] * len(windows)
        pairs = []
        for repeat in range(REPEATS + 2):
            ours = milliseconds(exchange_all, exchange, windows, gradients)
            stock = milliseconds(dist.all_reduce, plain)
            plain.normal_()
            if repeat > 1:
                pairs.append((ours, stock))
        total = WindowedDigits(windows[0].base, windows[0].words.clone())
        whole = [torch.empty_like(total.words) for _ in range(world)]
        dist.all_gather(whole, total.words)
        check = WindowedDigits(total.base, sum(whole[1:], whole[0].clone()), states=world)
        assert torch.equal(check.round(denominator=24).view(-1), gradients[0]), "the exchange rounded something else"
        rows.append(
            {
                "work": f"exact sum over {world} GPUs of {ELEMENTS >> 20} Mi gradient elements, {words} words, "
                f"buckets of {BUCKET >> 20} Mi",
                "ratio": round(median(a / b for a, b in pairs), 2),
                "against": "NCCL all_reduce float32",
                "ours_ms": round(median(a for a, _ in pairs), 3),
                "stock_ms": round(median(b for _, b in pairs), 3),
                "target": {3: 2.5, 4: 3.2}[words],
            }
        )
    dist.destroy_process_group()
    if rank == 0:
        answers.put(rows)


def main() -> int:
    world = torch.cuda.device_count()
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measure, (world, free_port(), answers), nprocs=world)
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    result = surroundings(
        f"{world} x {torch.cuda.get_device_name(0)}",
        commit=sys.argv[1] if len(sys.argv) > 1 else None,
        driver=driver[0] if driver else "unknown",
    )
    result["rows"] = answers.get()
    (RESULTS / "reducer-on-gpus.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["rows"]:
        print(f"{row['work']}: {row['ratio']} x {row['against']} ({row['ours_ms']} ms; aim {row['target']})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
