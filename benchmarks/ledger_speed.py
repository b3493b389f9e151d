"""How long bisect and diff take on two long ledgers, how fast digests are, and what recording costs a training.

    python -m benchmarks.ledger_speed --out benchmarks/results/ledger-cpu.json

With --gpu the digests and the recording of GPT-2 small are measured on a GPU instead (`ledger_on_gpu.py`; needs
transformers):

    python -m benchmarks.ledger_speed --gpu --out benchmarks/results/ledger-h200.json

The two ledgers have 100,000 steps of 300 tensors and part at a step in the middle; they are written to a directory that
is removed afterwards (about 1.1 GB), or kept with --ledgers DIR.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from blake3 import blake3

from benchmarks.surroundings import processor, surroundings
from det_lightning.ledger.digest import tensor_digest
from det_lightning.ledger.record import float_bits
from det_lightning.ledger.store import LedgerWriter

TENSORS = 300
COMMANDS = ("bisect", "diff")


def write_ledger(path: Path, steps: int, *, diverges_at: int | None = None) -> None:
    """A made-up run whose digests are a pure function of the step, and of the run from `diverges_at` on."""
    names = sorted(f"transformer.layer.{i // 12}.block.{i % 12}.weight" for i in range(TENSORS))
    writer = LedgerWriter.create(path, recipe={"seed": 1}, environment={"world_size": 1}, entry={})
    for step in range(steps + 1):
        key = f"{step} {diverges_at is not None and step >= diverges_at}".encode()
        row = blake3(key).digest(length=16 * TENSORS)
        leaves = {name: row[16 * i : 16 * i + 16] for i, name in enumerate(names)}
        agree = {
            "step": step,
            "epoch": step // 1000,
            "sample_ids": blake3(key[:6]).hexdigest(),
            "sample_bytes": f"{step:016x}",
            "loss": float_bits(2.0 + 1.0 / (step + 1)),
            "learning_rates": [float_bits(0.1)],
            "clip": None,
        }
        writer.append(agree, {"weights": leaves}, {"time_ns": step})
    writer.close()


def command_seconds(folder: Path, command: str, repeats: int = 5) -> dict:
    """A whole run of the command, the start of the interpreter included, and how much of the files it read."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "det_lightning", command, str(folder / "a"), str(folder / "b")],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds.append(time.perf_counter() - begin)
        assert done.returncode == 1, done.stderr
    return {"median_s": round(statistics.median(seconds), 3), "worst_s": round(max(seconds), 3), "repeats": repeats}


def digest_rate(elements: int = 1 << 24, repeats: int = 7) -> dict:
    """Bytes of float32 that one thread digests in a second of its own time, from memory and from the cache."""
    torch.set_num_threads(1)
    rates = {}
    for place, count in (("memory", elements), ("cache", 1 << 18)):
        tensor = torch.randn(count)
        tensor_digest(tensor)
        seconds = []
        for _ in range(repeats):
            begin = time.thread_time()
            for _ in range(elements // count):
                tensor_digest(tensor)
            seconds.append(time.thread_time() - begin)
        rates[f"{place}_GB_per_s"] = round(4e-9 * elements / statistics.median(seconds), 2)
    return {"bytes": 4 * elements, **rates, "repeats": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ledgers", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    if options.gpu:
        from benchmarks import ledger_on_gpu

        return write(ledger_on_gpu.measure(), options.out)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.ledgers or Path(scratch)
        begin, written = time.perf_counter(), None
        if not (folder / "b").exists():
            write_ledger(folder / "a", options.steps)
            write_ledger(folder / "b", options.steps, diverges_at=options.steps * 618 // 1000)
            written = round(time.perf_counter() - begin, 1)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        result = {
            **surroundings(processor()),
            "load_average": os.getloadavg()[0],  # above the number of cores other programs took part of the time
            "ledgers": {"steps": options.steps, "tensors": TENSORS, "bytes": size, "written_in_s": written},
            "commands": {command: command_seconds(folder, command) for command in COMMANDS},
            "digest": digest_rate(),
            "recording": recording_overhead(),
        }
    write(result, options.out)


def write(result: dict, out: Path | None) -> None:
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if out:
        out.write_text(text)


def recording_overhead(steps: int = 30) -> dict:
    """Seconds of a stock training step with and without a ledger of all kinds."""
    plain = [step_seconds(None, steps) for _ in range(3)]
    recorded = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            recorded.append(step_seconds(Path(folder, "ledger"), steps))
    without, with_ledger = statistics.median(plain), statistics.median(recorded)
    return {
        "step_s": round(without, 5),
        "step_with_ledger_s": round(with_ledger, 5),
        "overhead_percent": round(100 * (with_ledger / without - 1), 1),
        "steps": steps,
    }


def step_seconds(ledger: Path | None, steps: int) -> float:
    """One thread, seven million weights, batches of 256: seconds of one step, from the third to the last."""
    from det_lightning.callbacks.weight_ledger import WeightLedger
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning

    class Clock(Callback):
        times: list[float]

        def on_train_start(self, *_) -> None:
            self.times = []

        def on_train_batch_end(self, *_) -> None:
            self.times.append(time.thread_time())

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            layers = (layer for _ in range(6) for layer in (torch.nn.Linear(1088, 1088), torch.nn.ReLU()))
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    quiet_lightning()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = Clock()
    callbacks = [*([WeightLedger(ledger)] if ledger else []), clock]
    data = DataLoader(TensorDataset(torch.randn(256 * steps, 1088)), batch_size=256)
    Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=callbacks, **QUIET_TRAINER).fit(Module(), data)
    return (clock.times[-1] - clock.times[2]) / (len(clock.times) - 3)


if __name__ == "__main__":
    main()
