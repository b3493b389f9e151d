"""What `Fabric(strategy="det")` does, for both of Fabric's namespaces.

The loader yields the micro-batches of this rank (fabric_loader.py), whose tensors run under the contract until
fabric.backward has taken their loss (covered_tensor.py, fabric_step.py). No DDP wrapper, no hook on gradients.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from det_lightning.distributed.metric_reduce import reduce_metric
from det_lightning.distributed.slice_loader import SliceLoader, SliceSampler, check_loader
from det_lightning.errors import InputError, UncoveredError
from det_lightning.layers.convert import convert
from det_lightning.optim.stepping import check_optimizer
from det_lightning.strategies.covered_tensor import CoveredModule
from det_lightning.strategies.data import TrainingData, check_same, evaluation_loader, order_of
from det_lightning.strategies.fabric_loader import FabricLoader
from det_lightning.strategies.fabric_step import FabricStepMixin
from det_lightning.strategies.resume import KEY, Stamp, stamp
from det_lightning.strategies.start import broadcast_state, check_not_compiled, check_subnormals, check_whole
from det_lightning.strategies.state_watch import StateWatch

STEPS_DONE = "steps_done"
_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


class FabricMixin(FabricStepMixin):
    """Mixed in before Fabric's DDPStrategy, of which launchers, ranks and the process group are used."""

    distributed_sampler_kwargs = None  # Fabric is not to put a sampler of its own in

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        accumulate: int = 1,
        global_batch: int | None = None,
        seed: int | None = None,
        stock_optimizers: bool = False,
        check_replicas: bool = True,
    ):
        """Trains to the same bits at any world size, micro-batch size and accumulation.

        Args:
            accumulate: calls of fabric.backward between two steps of the optimizer, as the loop makes them.
            global_batch: samples of one optimizer step over all ranks and micro-batches. By default world size x the
                DataLoader's batch_size x accumulate; when given, the DataLoader's batch_size is not looked at.
            seed: key of the sample order; by default that of `seed_everything`, else 0.
            stock_optimizers: step an optimizer that has no sequence of ours as it is.
            check_replicas: compare the digests of all weights over the ranks after every optimizer step.
            start_method: how Fabric starts the processes; the other arguments are Fabric's too.
        """
        for name, value in (("accumulate", accumulate), ("global_batch", global_batch)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._accumulate, self._global_batch = accumulate, global_batch
        self._stock_optimizers, self._check_replicas = stock_optimizers, check_replicas
        self.training_data = TrainingData(global_batch, seed)
        self._resumed: Stamp | None = None
        self._watch = StateWatch()
        self._optimizers: list[Optimizer] = []
        self._backward_sync_control = self

    # Set-up

    def setup_module(self, module: nn.Module) -> CoveredModule:
        check_subnormals()
        check_whole(module)
        check_not_compiled(module)
        if self.precision.precision not in _PRECISIONS:
            raise UncoveredError(
                f'Fabric(strategy="det") covers precision {", ".join(_PRECISIONS)}, got {self.precision.precision}. The '
                f"strategy of Trainer covers bf16-true and bf16-mixed too."
            )
        if self._module is not None:
            raise UncoveredError(
                'Fabric(strategy="det") sets up one module, and has one already. Put the models into one nn.Module whose '
                "forward says which of them runs."
            )
        convert(module)
        broadcast_state(module)
        self._module = module
        return CoveredModule(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        check_optimizer(optimizer, as_it_is=self._stock_optimizers)
        self._optimizers.append(optimizer)
        return optimizer

    def process_dataloader(self, dataloader: DataLoader) -> FabricLoader:
        check_loader(dataloader)
        return FabricLoader(dataloader, self)

    # Data

    def is_training(self) -> bool:
        return torch.is_grad_enabled() and (self._module is None or self._module.training)

    def training_loader(self, loader: DataLoader) -> SliceLoader:
        size = self._global_batch
        if size is None and loader.batch_size is not None:
            size = self.world_size * loader.batch_size * self._accumulate
        order = order_of(loader, global_batch=size, seed=self.training_data.seed)
        sampler = SliceSampler(
            order,
            world_size=self.world_size,
            rank=self.global_rank,
            accumulate=self._accumulate,
            steps_done=lambda: self.steps_done,
        )
        return SliceLoader(loader, sampler, may_draw=False)

    def begin_pass(self, loader: SliceLoader) -> None:
        data, order = self.training_data, loader.slice_sampler.order
        if data.order is None:
            check_same(order)
            data.take(loader)
        elif data.order is not order:
            raise UncoveredError(
                'Fabric(strategy="det") trains on one DataLoader, and a pass over a second one began in training mode. Join '
                "the data sets (torch.utils.data.ConcatDataset or StackDataset); evaluate under torch.no_grad() or after "
                "model.eval()."
            )
        if self._resumed is not None:
            self._resumed.check(order)
        super().begin_pass(loader)

    def other_loader(self, loader: DataLoader) -> SliceLoader:
        return evaluation_loader(loader, world_size=self.world_size, rank=self.global_rank, stand_ins=False)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Exact sums, one rounding; the result is put into the tensor too, as Fabric says."""
        if not isinstance(tensor, Tensor):
            return tensor
        result = reduce_metric(tensor.detach(), group, reduce_op)
        if result.dtype == tensor.dtype:
            tensor.detach().copy_(result)
        return result

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(module.module if isinstance(module, CoveredModule) else module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        inner = module.module if isinstance(module, CoveredModule) else module
        super().load_module_state_dict(inner, state_dict, strict=strict)

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Fabric's, and where the run stands in the order of samples."""
        if self._pending:
            raise InputError(
                f"a checkpoint was asked for after {self._pending} of {self._accumulate} micro-batches of a step; their "
                f"digits are not part of a checkpoint. Save after optimizer.step()."
            )
        if self.training_data.order is not None:
            state = {**state, KEY: {**stamp(self.training_data.order, self._accumulate), STEPS_DONE: self.steps_done}}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Fabric's; where an optimizer is restored, the run goes on at the checkpoint's place in the order."""
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict) and any(isinstance(each, Optimizer) for each in state.values()):
            saved = dict(remainder.pop(KEY, {}))
            self.steps_done = saved.pop(STEPS_DONE, 0)
            self._resumed = Stamp(**saved) if saved else None
        return remainder
