"""When a request is sent again, and after how long. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .errors import ApiError, LimitReached, RequestInProgress, Unavailable

# A server that never answered is not waited for as long as one that restarts.
FIRST_CONTACT_SECS = 2.0


def delays() -> Iterator[float]:
    """Seconds before each repetition."""
    yield from (0.1, 0.25, 0.5, 1.0, 2.0)
    while True:
        yield 4.0


def may_repeat(error: ApiError, *, repeatable: bool) -> bool:
    """Whether the server refused only for now. A 429 is a refusal before anything was done."""
    if isinstance(error, LimitReached) and error.status == 429:
        return True
    return repeatable and isinstance(error, Unavailable | RequestInProgress)


def is_repeatable(method: str, key: str | None) -> bool:
    """Whether sending the request twice has the effect of sending it once."""
    return method in {"GET", "HEAD", "PUT"} or key is not None
