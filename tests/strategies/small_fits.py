"""A small training and Trainers for it, for the tests of what people do with one."""

from functools import cache

from lightning.pytorch import Trainer
from torchmetrics import Accuracy

from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import free_port, given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.trainings import CLASSES, Network, Run, Split, train

PLAIN = Run(split=Split(1, 12, 1), samples=48, steps=8)


@cache
def plain():
    return here(PLAIN).weights


def here(run: Run):
    """The run with one rank in this process."""
    return train(0, 1, free_port(), run)


def trainer_of(rank, world_size, port, *callbacks, **arguments) -> Trainer:
    quiet_lightning()
    options = {"max_steps": 8, "max_epochs": -1, "gradient_clip_val": 0.05, **QUIET_TRAINER, **arguments}
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DetStrategy(cluster_environment=given_ranks(rank, world_size, port)),
        callbacks=list(callbacks),
        **options,
    )


class Logging(Network):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class Seen(Network):
    """Counts and records what it is shown, in each of the ways that people count."""

    def __init__(self):
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES, average="micro")
        self.right = Accuracy("multiclass", num_classes=CLASSES, average="micro")

    def _look(self, batch):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        self.log("count", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.log("mean_position", (y * 2).float().mean(), sync_dist=True, batch_size=len(x))
        self.log("inferred", (y * 2).float().mean(), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self._look(batch)

    def test_step(self, batch, batch_idx):
        self._look(batch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0]
