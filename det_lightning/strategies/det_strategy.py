"""What `strategy="det"` does at each hook of Lightning, for both of Lightning's namespaces.

Order of one optimizer step: training_step under the function mode (layers/function_mode.py) -> backward, which leaves
digits in the reducer -> after the last micro-batch one exact all-reduce and one rounding (distributed/reducer.py)
-> exact clipping and our optimizer sequence (det_precision.py).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from det_lightning.distributed.metric_reduce import reduce_metric
from det_lightning.distributed.random_guard import no_draws
from det_lightning.errors import InputError, UncoveredError
from det_lightning.layers.code_in_sight import code_in_sight
from det_lightning.layers.convert import convert, refuse_hooks, restore
from det_lightning.layers.function_mode import FunctionMode
from det_lightning.optim.stepping import check_optimizer
from det_lightning.strategies import plateau, resume
from det_lightning.strategies.accumulation import accumulation_of
from det_lightning.strategies.batch_hooks import BatchMarks, cover_before_transfer, uncover_before_transfer
from det_lightning.strategies.data import TrainingData, check_fetching, evaluation_loader
from det_lightning.strategies.evaluation_limits import EvaluationLimits
from det_lightning.strategies.exact_metrics import make_metrics_exact, make_metrics_stock
from det_lightning.strategies.exact_results import ExactCollection, make_exact, make_stock
from det_lightning.strategies.prediction import PredictionCheck
from det_lightning.strategies.stand_in import surroundings
from det_lightning.strategies.start import broadcast_state, check_not_compiled, check_subnormals, check_whole
from det_lightning.strategies.step import StepMixin
from det_lightning.strategies.trainer_checks import check_rate_finder, check_schedules, check_trainer

ARITHMETIC = "det"


class DetStrategyMixin(StepMixin):
    """Mixed in before Lightning's DDPStrategy, of which launchers, ranks and the process group are used."""

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        global_batch: int | None = None,
        seed: int | None = None,
        stock_optimizers: bool = False,
        check_replicas: bool = True,
    ):
        """Trains to the same bits at any world size, micro-batch size and accumulation.

        Args:
            global_batch: samples of one optimizer step over all ranks and micro-batches. By default world size x
                the DataLoader's batch_size x accumulate_grad_batches; when given, the DataLoader's batch_size is
                not looked at, and any world size will do, divisor or not.
            seed: key of the sample order; by default that of `seed_everything`, else 0.
            stock_optimizers: step an optimizer that has no sequence of ours as it is, and say which claim is lost.
            check_replicas: compare the digests of all weights over the ranks after every optimizer step, and stop with
                the rank's and the tensor's name where they differ.
            start_method: how Lightning starts the processes; the other arguments are Lightning's too.
        """
        if global_batch is not None and global_batch < 1:
            raise InputError(f"global_batch must be at least 1, got {global_batch}")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._stock_optimizers, self._check_replicas = stock_optimizers, check_replicas
        self.lost_claims: list[str] = []
        self.record_samples = False
        self.saved_checkpoints: list[tuple[int, str]] = []
        self.training_data = TrainingData(global_batch, seed)
        self._evaluation_limits = EvaluationLimits()
        self._prediction_check = PredictionCheck()
        self._swapped: dict[str, type] = {}
        self._marks = BatchMarks()
        self._clear_step()
        self._logged: dict[str, Any] | None = None
        self._due: list[list] = []
        self._looked_at: int | None = None  # the step after which a resumed run took looks of the run before
        self._resumed: resume.Stamp | None = None
        self._trainer = self._connector = self._own_sampler = None

    # Set-up

    def setup(self, trainer) -> None:
        self._trainer = trainer
        check_trainer(trainer, self.root_device)
        check_subnormals()
        check_whole(self.model)
        check_not_compiled(self.model)
        if trainer.state.fn.value != "predict":
            # Lightning would replace the user's order before process_dataloader sees it.
            self._connector = trainer._accelerator_connector
            self._connector.use_distributed_sampler, self._own_sampler = False, self._connector.use_distributed_sampler
        else:
            self._prediction_check.begin(trainer)
        self._swapped = convert(self.model)
        make_metrics_exact(self.model)
        for loop in _logging_loops(trainer):
            make_exact(loop._results)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """No wrapper; but every rank starts from rank 0's state, as under ddp."""
        broadcast_state(self.model)

    def setup_optimizers(self, trainer) -> None:
        super().setup_optimizers(trainer)
        lost = [check_optimizer(optimizer, as_it_is=self._stock_optimizers) for optimizer in self.optimizers]
        self.lost_claims = [claim for claim in lost if claim is not None]
        for claim in self.lost_claims if self.is_global_zero else ():
            warnings.warn(claim, stacklevel=2)
        check_schedules(self.lr_scheduler_configs, max(accumulation_of(trainer).values))

    def on_train_start(self) -> None:
        super().on_train_start()
        refuse_hooks(self.lightning_module)  # callbacks may have added some since setup
        trainer = self.lightning_module.trainer
        check_fetching(trainer)
        check_rate_finder(trainer, self.world_size)
        # Lightning's scheduler sets it when an epoch begins, not when a run goes on within one.
        trainer.accumulate_grad_batches = accumulation_of(trainer).at(self.training_data.place()[0])
        self._go_on_logging()
        self._looked_at = trainer.global_step if self._due else None
        plateau.look(trainer, self._due)
        self._due = []
        self._clear_step()
        cover_before_transfer(self.lightning_module, lambda: self._mode(sink=None, phase="before transfer"))

    def teardown(self) -> None:
        # With spawn and fork this process may have a module that only its children have set up.
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            restore(self.lightning_module, self._swapped)
            self._swapped = {}
            make_metrics_stock(self.lightning_module)
            uncover_before_transfer(self.lightning_module)
            self.training_data.give_limit_back(trainer)
            self._evaluation_limits.give_back(trainer)
            self._prediction_check.end()
            for loop in _logging_loops(trainer):
                make_stock(loop._results)
        self._clear_step()
        self._resumed = None
        if self._connector is not None:
            self._connector.use_distributed_sampler, self._connector = self._own_sampler, None
        super().teardown()

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if trainer.training:
            return self.training_data.attach(
                dataloader,
                trainer,
                world_size=self.world_size,
                rank=self.global_rank,
                record_samples=self.record_samples,
                resumed=self._resumed,
            )
        if trainer.predicting and not isinstance(getattr(dataloader, "dataset", None), IterableDataset):
            return dataloader  # Lightning has cut it, without repeating a sample
        options = {"stand_ins": not trainer.predicting, "part": self._evaluation_limits.part(trainer)}
        return evaluation_loader(dataloader, world_size=self.world_size, rank=self.global_rank, **options)

    # One step

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Under the function mode too: the hook on_after_batch_transfer computes on whole micro-batches."""
        if not self.lightning_module.trainer.training:
            return super().batch_to_device(batch, device, dataloader_idx)
        with no_draws("in a hook that transfers a batch"), code_in_sight(), self._mode(sink=None, phase="transfer"):
            batch = super().batch_to_device(batch, device, dataloader_idx)
        self._marks.note(batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """After the hook of that name of callbacks and module."""
        super().on_train_batch_start(batch, batch_idx)
        self._marks.check(batch)
        if self._untrained:
            raise UncoveredError(
                "the batch before was not trained: on_train_batch_start returned -1, which skips the rest of an epoch. The "
                "order of samples is counted in steps from the run's start, so an epoch cannot end early. Use "
                "limit_train_batches, or leave the samples out in the data set."
            )
        self._untrained = True

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation(args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation(args):
            return super().test_step(*args, **kwargs)

    @contextmanager
    def _evaluation(self, args: tuple) -> Iterator[None]:
        loop = self.lightning_module.trainer._active_loop
        loader = loop._combined_loader.flattened[args[2] if len(args) > 2 else 0]
        here = getattr(loader, "current", None)
        samples = here.positions[1] - here.positions[0] if here is not None else 1
        mode = FunctionMode(self.lightning_module, sink=None, samples=max(samples, 1), strict=False)
        weightless = here is not None and here.empty
        with surroundings(self.lightning_module, mode, weightless=weightless, window=object()):
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return reduce_metric(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor

    def on_exception(self, exception: BaseException) -> None:
        self._clear_step()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        trainer = self.lightning_module.trainer
        accumulate = trainer.accumulate_grad_batches
        within = self._pending > 0 or resume.within_step(checkpoint, accumulate)
        if within:
            resume.back_to_whole_step(checkpoint, accumulate)
        if self.training_data.order is not None:
            checkpoint[resume.KEY] = resume.stamp(self.training_data.order, accumulate)
            # Other ranks may be gone after an exception.
            if self.training_data.place()[1] and not (within and trainer.state.status.value == "interrupted"):
                checkpoint[resume.KEY][resume.LOGGED] = self._logged_so_far(within=within)
            if trainer.global_step != self._looked_at and (due := plateau.looks_due(trainer)):
                checkpoint[resume.KEY][plateau.KEY] = due
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.saved_checkpoints.append((checkpoint["global_step"], str(filepath)))

    def _logged_so_far(self, *, within: bool) -> dict[str, Any]:
        epoch, step = self.training_data.place()
        results = self.lightning_module.trainer.fit_loop.epoch_loop._results
        sums = results.sums(within=within) if isinstance(results, ExactCollection) else {}
        return {"epoch": epoch, "step": step, "sums": {key: list(value) for key, value in sums.items()}}

    def _go_on_logging(self) -> None:
        """Hands the sums of an epoch that a checkpoint interrupted to the first rank, and none to the others."""
        saved, self._logged = self._logged, None
        if saved is None or (saved["epoch"], saved["step"]) != self.training_data.place():
            return
        results = self.lightning_module.trainer.fit_loop.epoch_loop._results
        results.resumed = {
            key: (value if value.is_floating_point() or self.global_rank == 0 else torch.zeros_like(value), steps)
            for key, (value, steps) in saved["sums"].items()
        }

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        trainer = self.lightning_module.trainer
        if trainer.state.fn.value == "fit":
            self._logged = checkpoint.get(resume.KEY, {}).get(resume.LOGGED)
            self._due = checkpoint.get(resume.KEY, {}).get(plateau.KEY, [])
            self._resumed = resume.take_over(checkpoint, accumulation_of(trainer).at, by_steps=trainer.max_steps != -1)
        return checkpoint


def _logging_loops(trainer) -> list[Any]:
    training = trainer.fit_loop.epoch_loop
    return [training, training.val_loop, trainer.validate_loop, trainer.test_loop]
