"""What FaultGuard costs a training step under `strategy="det"` on a CPU, as ratios within one process.

    python -m benchmarks.fault_guard_speed --out benchmarks/results/fault-guard-cpu.json

One thread, and processor time, so that what other programs take does not count; the trainings take turns, and of the ratios
of each turn the median is taken.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.perceptron import Perceptron
from benchmarks.surroundings import processor, surroundings
from det_lightning import FaultGuard
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning

LAYERS, WIDTH, BATCH = 5, 384, 256
TURNS, WARM_UP, STEPS = 9, 1, 5
GUARDS = {
    "none": lambda: [],
    "memory": lambda: [FaultGuard(products_every_n_steps=None)],
    "all": lambda: [FaultGuard(products_every_n_steps=1)],
}


class Clock(Callback):
    """The processor time at the end of every step."""

    def __init__(self):
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, *_) -> None:
        self.times.append(time.process_time())


def step_seconds(guards: list[Callback]) -> float:
    """Of a training with these guards, the median of its steps."""
    torch.manual_seed(0)
    samples = BATCH * (WARM_UP + STEPS)
    data = TensorDataset(torch.randn(samples, WIDTH), torch.randint(WIDTH, (samples,)))
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy="det", max_epochs=1, callbacks=[*guards, clock], **QUIET_TRAINER
    )
    trainer.fit(Perceptron(LAYERS, WIDTH), DataLoader(data, batch_size=BATCH))
    times = clock.times[WARM_UP - 1 :]
    return median(after - before for before, after in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet_lightning()
    torch.set_num_threads(1)
    turns = [{name: step_seconds(guards()) for name, guards in GUARDS.items()} for _ in range(TURNS)]
    memory, everything = (100 * (median(turn[name] / turn["none"] for turn in turns) - 1) for name in ("memory", "all"))
    weights = sum(parameter.numel() for parameter in Perceptron(LAYERS, WIDTH).parameters())
    result = {
        **surroundings(processor()),
        "work": f"step of {BATCH} samples, {LAYERS} layers of {WIDTH}, {weights / 1e6:.1f} million weights, AdamW, "
        f"float32, one thread",
        "turns": TURNS,
        "step_processor_s": [round(turn["none"], 3) for turn in turns],
        "memory_percent": round(memory, 1),
        "all_percent": round(everything, 1),
        "all_every_10_percent": round(memory + (everything - memory) / 10, 1),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
