"""Times a whole training step under `strategy="det"` beside the stock float32 step of the same network.

`python benchmarks/training_step.py [COMMIT] [--profile]`, on a GPU if there is one, else on the CPU. A multilayer
perceptron with AdamW, one device, batches that fill it and lie there already; medians over steps after a warm-up.
"""

import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from lightning.pytorch import Callback, Trainer  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import det_lightning  # noqa: E402, F401 - registers the strategy
from benchmarks.perceptron import Perceptron  # noqa: E402
from benchmarks.surroundings import RESULTS, keep, output_of, processor, surroundings  # noqa: E402
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning  # noqa: E402

GPU = torch.cuda.is_available()
LAYERS, WIDTH, BATCH = (6, 4096, 4096) if GPU else (4, 768, 512)
WARM_UP, STEPS = 4, 12
CLASSES = 1024


class Loaded(Dataset):
    """Random samples that lie on the device, handed out a whole batch at once: loading takes next to no time."""

    def __init__(self, samples: int):
        device = "cuda" if GPU else "cpu"
        self._x, self._y = torch.randn(samples, WIDTH, device=device), torch.randint(CLASSES, (samples,), device=device)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, places: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[places], self._y[places]

    def __getitems__(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.tensor(places, device=self._x.device)
        return self._x[places], self._y[places]


def as_loaded(batch):
    return batch


class Clock(Callback):
    """The seconds of every step; under a profiler from the first step after the warm-up on, if one is given."""

    def __init__(self, profiler=None):
        self.seconds, self._profiler, self._last = [], profiler, 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if GPU:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        if self._profiler is not None and len(self.seconds) == WARM_UP:
            self._profiler.start()
        self._last = time.perf_counter()


SURE = 5.0
"""Standard deviation, over samples, of logits that are sure of their classes: probabilities span some 60 binades."""


def perceptron(data: Loaded, logits: float | None) -> Perceptron:
    """With logits of this standard deviation, if it is given."""
    model = Perceptron(LAYERS, WIDTH, CLASSES)
    if logits is not None:
        with torch.no_grad():
            last = model.network[-1]
            last.weight.mul_(logits / model.network(data[:256][0].cpu()).std(dim=0).mean())
    return model


def step_seconds(strategy: str, accumulate: int, logits: float | None, profiler=None) -> float:
    torch.manual_seed(0)
    data = Loaded(BATCH * (WARM_UP + STEPS))
    clock = Clock(profiler)
    trainer = Trainer(
        accelerator="gpu" if GPU else "cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[clock],
        accumulate_grad_batches=accumulate, **QUIET_TRAINER,
    )  # fmt: skip
    loader = DataLoader(data, batch_size=BATCH // accumulate, collate_fn=as_loaded)
    trainer.fit(perceptron(data, logits), loader)
    if profiler is not None:
        profiler.stop()
    seconds = clock.seconds[WARM_UP * accumulate :]
    return median(sum(seconds[i : i + accumulate]) for i in range(0, len(seconds), accumulate))


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--profile"]
    torch.backends.cuda.matmul.allow_tf32 = False
    quiet_lightning()
    device = torch.cuda.get_device_name(0) if GPU else processor()
    driver = {"driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]}
    result = surroundings(device, commit=words[0] if words else None, **(driver if GPU else {}))
    rows = result["rows"] = []
    for accumulate, logits in ((1, None), (4, None), (4, SURE)):
        stock = step_seconds("auto", accumulate, logits)
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        ours = step_seconds("det", accumulate, logits)
        parameters = sum(parameter.numel() for parameter in Perceptron(LAYERS, WIDTH, CLASSES).parameters())
        rows.append(
            {
                "work": f"step of {BATCH} samples, {LAYERS + 1} layers of {WIDTH}, {parameters / 1e6:.0f} million weights, "
                f"AdamW, micro-batches: {accumulate}"
                + ("" if logits is None else f", logits of deviation {logits:.0f}"),
                "ratio": round(ours / stock, 2),
                "against": "strategy auto, float32",
                "ours_ms": round(1000 * ours, 2),
                "stock_ms": round(1000 * stock, 2),
                "memory_GB": round(torch.cuda.max_memory_allocated() / 1e9, 1) if GPU else None,
            }
        )
        keep(RESULTS / f"training-step-{'gpu' if GPU else 'cpu'}.json", result)
        print(f"{rows[-1]['work']}: {rows[-1]['ratio']} x ({rows[-1]['ours_ms']} ms)", flush=True)
    if "--profile" in sys.argv:
        activity = torch.profiler.ProfilerActivity
        profiler = torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if GPU else [])])
        step_seconds("det", 4, None, profiler)
        for order in ("self_cuda_time_total", "self_cpu_time_total") if GPU else ("self_cpu_time_total",):
            print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
