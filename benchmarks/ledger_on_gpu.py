"""What a ledger costs on a GPU: the rate of digests beside that of a copy, and a training step of GPT-2 small with and
without a ledger of all kinds. `python -m benchmarks.ledger_speed --gpu` runs it; all ratios are of one run.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.surroundings import surroundings
from det_lightning.kernels.dispatch import many_lanes, tensor_lanes
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning

BATCH, TOKENS = 8, 512
ROUNDS, STEPS, WARM_STEPS = 5, 24, 4
AIMS = {"digest_share_of_copy_percent": 60, "ledger_overhead_percent": 2}


def measure(device: str = "cuda", size: dict[str, int] | None = None, steps: int = STEPS) -> dict:
    """Everything; another device and a small model are for trying the benchmark itself."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    result = {**surroundings(name), "aims": AIMS}
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        result["digests"] = digest_rows()
    return result | {"recording": recording(device, size or {}, steps)}


def digest_rows() -> list[dict]:
    """A large tensor of each width, and the tensors of GPT-2 small in one launch."""
    rows = []
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        tensor = torch.randn(1 << 28, device="cuda").to(dtype)
        rows.append({"tensors": f"one of 2^28 {str(dtype).removeprefix('torch.')}", **_rate([tensor])})
        del tensor
    network = Transformer({}).to("cuda")
    rows.append({"tensors": "weights of GPT-2 small, float32", **_rate(list(network.parameters()))})
    return rows


def _rate(tensors: list[torch.Tensor]) -> dict:
    """Bytes digested a second, and bytes read and written a second by the faster of two ways to copy the same tensors."""
    tensors = [tensor.detach() for tensor in tensors]
    assert [tuple(lane % 2**64 for lane in row) for row in many_lanes(tensors[:1]).tolist()] == [
        tensor_lanes(tensors[0])
    ]
    copies, size = [torch.empty_like(tensor) for tensor in tensors], sum(tensor.nbytes for tensor in tensors)
    digested, copied, copied_together = [], [], []
    for _ in range(5):  # side by side, so that both see the same clocks
        digested.append(_seconds(lambda: many_lanes(tensors)))
        copied.append(_seconds(lambda: [to.copy_(tensor) for to, tensor in zip(copies, tensors, strict=True)]))
        copied_together.append(_seconds(lambda: torch._foreach_copy_(copies, tensors)))
    copied = min(copied, copied_together, key=statistics.median)
    digest, copy = size / statistics.median(digested), 2 * size / statistics.median(copied)
    return {
        "bytes": size,
        "digest_GB_per_s": round(digest / 1e9),
        "copy_read_and_write_GB_per_s": round(copy / 1e9),
        "share_of_copy_percent": round(100 * digest / copy, 1),
        "time_of_copy_percent": round(100 * statistics.median(digested) / statistics.median(copied), 1),
    }


def _seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e-3 * begin.elapsed_time(end) / repeats


class Transformer(LightningModule):
    """GPT-2 small of transformers with random weights; `size` replaces entries of its configuration."""

    def __init__(self, size: dict[str, int]):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        self.net = GPT2LMHeadModel(GPT2Config(**size))

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Clock(Callback):
    """Times of the first step that counts and of the end, the device waited for at both and nowhere between."""

    def __init__(self, device: str):
        self.device, self.marks = device, []

    def mark(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == WARM_STEPS:
            self.mark()

    def on_train_end(self, trainer, pl_module) -> None:  # after the ledger's: its last record is in the time
        self.mark()


def recording(device: str, size: dict[str, int], steps: int) -> dict:
    """Seconds of a stock float32 step without, with roots only, and with all digests, in turn and several times over."""
    quiet_lightning()
    module = Transformer(size)
    tokens = torch.randint(
        module.net.config.vocab_size, (BATCH * steps, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    kinds: dict[str, dict[str, Any] | None] = {
        "without": None,
        "ledger": {},
        "ledger_of_roots": {"leaves_every_n_steps": 1000},
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(ROUNDS):
            for name, options in kinds.items():
                ledger = [] if options is None else [WeightLedger(Path(folder, f"{name}-{turn}"), **options)]
                seconds[name].append(_fit(module, tokens, ledger, device, steps))
    states = named_states(module, module.trainer.optimizers)
    without = statistics.median(seconds["without"])
    shares = {
        name: [100 * (one / bare - 1) for one, bare in zip(of, seconds["without"], strict=True)]
        for name, of in seconds.items()
        if name != "without"
    }
    return {
        "model": f"GPT-2 of transformers, {sum(each.numel() for each in module.parameters())} weights, random",
        "batch": f"{BATCH} x {TOKENS} tokens, float32, AdamW, stock Lightning on one device",
        "digested_bytes_a_step": sum(tensor.nbytes for named in states.values() for tensor in named.values()),
        "step_s": round(without, 6),
        **{f"step_with_{name}_s": round(statistics.median(seconds[name]), 6) for name in shares},
        **{f"{name}_overhead_percent": round(statistics.median(each), 2) for name, each in shares.items()},
        "overheads_of_rounds_percent": {name: [round(each, 2) for each in of] for name, of in shares.items()},
        "rounds": ROUNDS,
        "steps_a_round": steps - WARM_STEPS,
    }


def _fit(module: Transformer, tokens: torch.Tensor, ledger: list[Callback], device: str, steps: int) -> float:
    """Seconds of one step, the first ones left out."""
    clock = _Clock(device)
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        callbacks=[*ledger, clock],
        **QUIET_TRAINER,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=BATCH))
    begin, end = clock.marks
    return (end - begin) / (steps - WARM_STEPS)
