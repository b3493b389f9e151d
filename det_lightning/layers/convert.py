"""Swaps a model's layers in place and refuses, by path, the modules that have no contract."""

from torch import nn

from det_lightning.errors import UncoveredError
from det_lightning.layers.linear import DetLinear

SWAPS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: DetLinear}

# Modules of torch.nn whose forward is made of covered calls, or which compute nothing.
COVERED = {
    DetLinear,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.ReLU,
    nn.CrossEntropyLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.NLLLoss,
    nn.KLDivLoss,
    nn.LogSoftmax,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
}


_STATISTICS = (
    " A BatchNorm takes statistics over the samples of a micro-batch, which depend on how the global batch is cut."
)
# Beginning of a class's name -> what to write, or why there is nothing.
_HINTS = {
    "Embedding": " An Embedding is F.one_hot(index, len(table)).to(table.dtype) @ table, with table an nn.Parameter.",
    "BatchNorm": _STATISTICS,
    "SyncBatchNorm": _STATISTICS,
    "Lazy": " A lazy layer has no parameters yet: give its sizes, as nn.Linear takes them.",
}


def convert(model: nn.Module) -> dict[str, type[nn.Module]]:
    """Swaps classes in place: Parameters, hooks, names and the user's references stay as they are.

    Returns:
        path -> original class, for `restore`.

    Raises:
        UncoveredError: names every module of torch.nn that has no contract, and every parameter with a hook;
            the model is then unchanged.
    """
    refused = [
        f"  {path or '(the model itself)'}: {type(module).__name__}"
        for path, module in model.named_modules()
        if type(module).__module__.startswith("torch.nn.modules.")
        and type(module) not in COVERED
        and type(module) not in SWAPS
    ]
    if refused:
        raise UncoveredError(
            'strategy="det" has no arithmetic contract for these modules:\n'
            + "\n".join(refused)
            + "\nReplace them by covered ones ("
            + ", ".join(sorted(cls.__name__ for cls in {*SWAPS, *COVERED} - {DetLinear}))
            + '), or train with another strategy, e.g. strategy="ddp".'
            + "".join(dict.fromkeys(hint for line in refused for kind, hint in _HINTS.items() if f": {kind}" in line))
        )
    refuse_hooks(model)
    swapped = {}
    for path, module in model.named_modules():
        if type(module) in SWAPS:
            swapped[path] = type(module)
            module.__class__ = SWAPS[type(module)]
    return swapped


def refuse_hooks(model: nn.Module) -> None:
    """Raises UncoveredError if a parameter or a module has a hook that sees or changes gradients in backward."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UncoveredError(
                f'the parameter {name} has a gradient hook. Under strategy="det" its gradient exists only after the '
                f"exact sum over all ranks: remove the hook and read or change .grad in on_before_optimizer_step."
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise UncoveredError(
                f"the module {path or '(the model itself)'} has a backward hook, which may change gradients before the "
                f"exact sum; remove it."
            )


def restore(model: nn.Module, swapped: dict[str, type[nn.Module]]) -> None:
    """Undoes `convert`."""
    for path, original in swapped.items():
        model.get_submodule(path).__class__ = original
