"""The formats of streamed answers: lines of JSON and server-sent events. Pure.

Lines end with a newline and nothing else: text of agents may contain the other line separators of
Unicode, which `str.splitlines` would split at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import ProtocolError

# Events and lines of output have at most 64 KiB; a much longer line is not from Harvest.
MAX_LINE_BYTES = 8 * 1024 * 1024


class Lines:
    """Splits chunks of bytes into lines."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that the chunk completes, without their ends."""
        first, *rest = chunk.split(b"\n")
        self._partial += first
        for part in rest:
            yield bytes(self._partial).removesuffix(b"\r")
            self._partial = bytearray(part)
        if len(self._partial) > MAX_LINE_BYTES:
            raise ProtocolError(f"the server sent a line longer than {MAX_LINE_BYTES} bytes")

    @property
    def complete(self) -> bool:
        """Whether the bytes so far end with a line."""
        return not self._partial


@dataclass(frozen=True)
class Frame:
    """A server-sent event."""

    event: str
    data: dict[str, Any]


class Frames:
    """Collects lines into server-sent events; an unfinished one at the end is discarded."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The events that the chunk completes; heartbeats are passed over."""
        for line in self._lines.feed(chunk):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data" and line:
                self._data.append(value)
            elif name == b"event":
                self._event = value.decode("utf-8", "replace")
            elif not line and self._data:
                yield Frame(self._event, json_object(b"\n".join(self._data)))
                self._event, self._data = "", []
            elif not line:
                self._event = ""


def json_object(line: bytes) -> dict[str, Any]:
    """A JSON object; raises `ProtocolError` for anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ProtocolError("the server's answer is not a JSON object")
    return value
