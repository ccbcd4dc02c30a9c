"""What the two clients do differently; the counterpart of `_async/compat.py`, written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from httpx import Client

__all__ = ["Client", "current_loop", "finish", "sleep"]

Value = TypeVar("Value")


def current_loop() -> object:
    """There is no event loop: connections belong to the program."""
    return None


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


def finish(work: Callable[[], Value]) -> Value:
    """Does the work; there are no tasks that could be cancelled."""
    return work()
