"""What a ledger's header says of a run: the recipe, which must agree between runs, and the environment, which may differ."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from blake3 import blake3
from det_lightning.callbacks.repository_state import repository_state
from det_lightning.callbacks.shards import Shards, logical_name

from det_lightning.kernels import cuda_compile
from det_lightning.kernels.dispatch import kernels_of
from det_lightning.ledger.record import canonical_json, float_bits, with_float_bits

CONTRACT_VERSION = 1
_PACKAGES = ("det-lightning", "torch", "lightning", "pytorch-lightning", "numpy", "numba", "scikit-learn")


def recipe(trainer: Any, module: torch.nn.Module, shards: Shards | None = None) -> dict[str, Any]:
    """Everything that decides the bits of the weights, apart from the code of the model and the data's content."""
    strategy = trainer.strategy
    order = getattr(getattr(strategy, "training_data", None), "order", None)
    return {
        "contract": CONTRACT_VERSION,
        "arithmetic": "det" if order is not None else _stock(strategy),
        "precision": str(trainer.precision),
        **({"lost_claims": list(lost)} if (lost := getattr(strategy, "lost_claims", None)) else {}),
        **({} if order is not None else {"seed": _seed(), "accumulate": trainer.accumulate_grad_batches}),
        "model": model_digest(module, getattr(strategy, "_swapped", {}), shards),
        "optimizers": [_optimizer(optimizer) for optimizer in trainer.optimizers],
        "schedulers": [_scheduler(config) for config in trainer.lr_scheduler_configs],
        "clip": {
            "value": None if trainer.gradient_clip_val is None else float_bits(float(trainer.gradient_clip_val)),
            "algorithm": str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)),
        },
        "data": None
        if order is None
        else {
            "samples": order.samples,
            "global_batch": order.global_batch,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "drop_last": order.drop_last,
            "steps_per_epoch": order.steps,
        },
    }


def _stock(strategy: Any) -> str:
    """The strategy, with what makes its sums others than the class's own."""
    parts = {name: getattr(strategy, f"_{name}", None) for name in ("ddp_comm_hook", "model_averaging_period")}
    changed = [f"{name} {getattr(value, '__name__', value)}" for name, value in parts.items() if value is not None]
    return " with ".join([f"stock {type(strategy).__name__}", *changed])


def environment(trainer: Any) -> dict[str, Any]:
    """Where and with what the run was made, as observed."""
    return {
        "device": str(trainer.strategy.root_device),
        "processor": _processor(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        **_gpu(trainer.strategy.root_device),
        "world_size": trainer.world_size,
        "accumulate": trainer.accumulate_grad_batches,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "kernels": kernels_of("machine_code").source_digest(),
        "engine": kernels_of("gemm").default_engine(torch.empty(0, device=trainer.strategy.root_device)),
        "flags": _flags(),
        "git": repository_state(),
    }


def model_digest(module: torch.nn.Module, swapped: dict[str, type], shards: Shards | None = None) -> str:
    """BLAKE3 of the module paths with their classes and of the parameters' names, shapes, dtypes and freezing; the same
    for a sharded model as for the whole one."""
    classes = {
        logical_name(f"{path}.")[:-1]: swapped.get(path, _own_class(child)).__qualname__
        for path, child in module.named_modules()
        if path and not hasattr(child, "_fsdp_wrapped_module") and not hasattr(child, "_checkpoint_wrapped_module")
    }
    named = {logical_name(name): parameter for name, parameter in module.named_parameters()}
    parameters = {
        name: [list(shards.shape(name, each) if shards else each.shape), str(each.dtype), each.requires_grad]
        for name, each in named.items()
    }
    return blake3(canonical_json([classes, parameters])).hexdigest()


def _own_class(module: torch.nn.Module) -> type:
    """The class that its author wrote: FSDP2 puts one of its own in front."""
    names = [each.__name__ for each in type(module).__mro__]
    return type(module).__mro__[names.index("FSDPModule") + 1] if "FSDPModule" in names else type(module)


def entry_of(function: str | None, arguments: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """How to build the run again: the function and its arguments, if they were given, the seed it was built under, and the
    Trainer's `trainer_settings`."""
    built_by = {"function": function, "arguments": with_float_bits(arguments or {})} if function else {}
    seed = {"seed": _seed(), "seed_workers": os.environ.get("PL_SEED_WORKERS") == "1"}
    return {**built_by, **seed, "trainer": settings}


def _seed() -> int | None:
    """That of `seed_everything`, if it was called."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return int(seed) if seed.isdigit() else None


def _optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = [
        {name: _plain(value) for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        | {"parameters": len(group["params"]), "lr": _plain(group.get("initial_lr", group["lr"]))}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__qualname__, "groups": groups}


def _scheduler(config: Any) -> dict[str, Any]:
    return {
        "class": type(config.scheduler).__qualname__,
        "interval": config.interval,
        "frequency": config.frequency,
        **({"monitor": config.monitor} if config.reduce_on_plateau else {}),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _plain(value.item())
    if isinstance(value, float):
        return float_bits(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)


def _processor() -> str:
    """The processor's model where the system tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}",
        "cuda_kernels": cuda_compile.source_digest(),
        "nvrtc": ".".join(map(str, cuda_compile.nvrtc_version())),
    }


def _flags() -> dict[str, Any]:
    """Switches of torch that move bits of stock operations, as they are now: whoever set them, and whenever."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "default_dtype": str(torch.get_default_dtype()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
