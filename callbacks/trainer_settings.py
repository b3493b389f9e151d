"""The settings of a Trainer that decide which samples come, and when it validates: what a replay has to be given again."""

from typing import Any

from det_lightning.ledger.record import float_bits

DDP_OPTIONS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "bucket_cap_mb",
)


def trainer_settings(trainer: Any) -> dict[str, Any]:
    """As given to the Trainer; to be asked for before its loaders are made, which may change some of them. Validation counts
    because under a stock strategy it draws random numbers, and because a schedule may follow what it logs."""
    clip, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    settings = {
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "gradient_clip_val": None if clip is None else float_bits(float(clip)),
        "gradient_clip_algorithm": None if algorithm is None else str(getattr(algorithm, "value", algorithm)),
        "overfit_batches": _number(trainer.overfit_batches),
        "limit_val_batches": _number(trainer.limit_val_batches),
        "val_check_interval": _number(trainer.val_check_interval),
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs,
    }
    if hasattr(trainer.strategy, "training_data"):
        return settings
    connector = trainer._accelerator_connector
    return settings | {
        "limit_train_batches": _number(trainer.limit_train_batches),
        "use_distributed_sampler": bool(getattr(connector, "use_distributed_sampler", True)),
        "sync_batchnorm": getattr(connector, "_layer_sync", None) is not None,
        "ddp": {
            name: _number(value)
            for name, value in getattr(trainer.strategy, "_ddp_kwargs", {}).items()
            if name in DDP_OPTIONS
        },
    }


def _number(value: Any) -> Any:
    """A number as a ledger holds it, a float as its bits; None for anything else, as a validation at times of the clock."""
    if isinstance(value, float):
        return float_bits(value)
    return value if isinstance(value, (bool, int)) else None
