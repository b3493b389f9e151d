"""Code that a function mode cannot look into: TorchScript is refused where it is called, and what torch.compile would make
of a function is not used, so that its calls are seen like any others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from det_lightning.layers.function_mode import FunctionMode

_SCRIPTS = (torch._C.ScriptFunction, torch._C.ScriptMethod)


@contextmanager
def code_in_sight() -> Iterator[None]:
    """Within, code of the user's own that runs under a strict FunctionMode calls nothing past it."""
    stock = [script.__call__ for script in _SCRIPTS]
    for script, call in zip(_SCRIPTS, stock, strict=True):
        script.__call__ = _refusing(call)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for script, call in zip(_SCRIPTS, stock, strict=True):
            script.__call__ = call


def _refusing(call: Callable) -> Callable:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, FunctionMode)]
        if modes and modes[-1].watches:
            raise modes[-1].refusal(
                f"the TorchScript function {self.name}",
                "Its operations are not seen: call the Python function or module that it was made of.",
            )
        return call(self, *args, **kwargs)

    return refuse
