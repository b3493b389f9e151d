"""Names in errors: of parameters, and of the module and the line whose call has no contract."""

import inspect
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from det_lightning.errors import UncoveredError


class ModelNames:
    """The names in one model."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._paths: dict[int, str] | None = None

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name in the model."""
        for name, candidate in self._model.named_parameters():
            if candidate is parameter:
                return name
        return "(not in the model)"

    def refusal(self, what: str, advice: str = "") -> UncoveredError:
        """The error for an uncovered call, with the path of the module whose code made it."""
        return UncoveredError(
            f'strategy="det" has no arithmetic contract for {what}, called in {self._place()}. '
            + (advice or 'Replace it by covered operations (linear, relu, losses, mean, + - * /, views), or move '
               'it out of training_step (data set, validation, callback), or train with strategy="ddp".')
        )  # fmt: skip

    def _place(self) -> str:
        """Path and line of the innermost module code on the stack."""
        for frame, owner, path in self._modules_on_the_stack():
            if not frame.f_code.co_filename.startswith(torch.__path__[0]):
                where = f"module {path!r}" if path else "the LightningModule itself"
                return f"{where} ({type(owner).__name__}.{frame.f_code.co_name}, line {frame.f_lineno})"
        return "code outside the model"

    def module_path(self) -> str:
        """Path of the innermost module whose code is running, torch's own included."""
        return next((path for _, _, path in self._modules_on_the_stack()), "")

    def _modules_on_the_stack(self) -> Iterator[tuple[FrameType, nn.Module, str]]:
        """(frame, module, its path) of the model's modules whose code is running, innermost first."""
        if self._paths is None:
            self._paths = {id(module): path for path, module in self._model.named_modules()}
        frame = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._paths:
                yield frame, owner, self._paths[id(owner)]
            frame = frame.f_back
