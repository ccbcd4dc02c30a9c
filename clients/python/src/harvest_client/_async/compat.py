"""What the two clients do differently. `_sync/compat.py` is its counterpart, written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from httpx import AsyncClient

__all__ = ["AsyncClient", "current_loop", "finish", "sleep"]

Value = TypeVar("Value")


def current_loop() -> object:
    """The event loop that connections belong to."""
    return asyncio.get_running_loop()


async def sleep(seconds: float) -> None:
    """Waits."""
    await asyncio.sleep(seconds)


async def finish(work: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
    """Completes the work even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
