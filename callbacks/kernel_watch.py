"""Callbacks that look at every kernel call of a step, and share the one place where calls can be observed."""

from collections.abc import Callable
from typing import Any

from det_lightning.kernels import dispatch

Watcher = Callable[[str, Callable, tuple, dict], Any]
"""Called as watcher(name, kernel, arguments, options); answers what the kernel answers."""

_watchers: list[Watcher] = []


def watch(watcher: Watcher, *, innermost: bool = False) -> bool:
    """From now on `watcher` is called in place of every kernel, and calls it. False, and nothing happens, while something
    else observes kernels, as the recording of operations does.

    innermost: its kernel is the real one, so that other watchers see what it answers.
    """
    if dispatch.observer not in (None, _observe):
        return False
    if watcher not in _watchers:
        _watchers.insert(len(_watchers) if innermost else 0, watcher)
    dispatch.observer = _observe
    return True


def unwatch(watcher: Watcher) -> None:
    """No more calls; a second call does nothing."""
    if watcher in _watchers:
        _watchers.remove(watcher)
    if not _watchers and dispatch.observer == _observe:
        dispatch.observer = None


def _observe(name: str, kernel: Callable, arguments: tuple, options: dict) -> Any:
    call = kernel
    for watcher in reversed(_watchers):
        call = _through(watcher, name, call)
    dispatch.observer = None  # what a watcher computes for itself is not observed
    try:
        return call(*arguments, **options)
    finally:
        dispatch.observer = _observe if _watchers else None


def _through(watcher: Watcher, name: str, kernel: Callable) -> Callable:
    return lambda *arguments, **options: watcher(name, kernel, arguments, options)
