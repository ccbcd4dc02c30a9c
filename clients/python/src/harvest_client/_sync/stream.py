# Generated from _async/stream.py by scripts/make_sync.py: do not edit.
"""Follows the events of a session without gap or repeat, across broken connections."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing

import httpx

from ..errors import ApiError, ConnectionLost, ServerUnreachable, Unavailable
from ..events import Event, parse_event
from ..retry import delays
from ..wire import Frame, Frames
from .compat import sleep
from .connection import Connection


def follow(connection: Connection, session_path: str, after: int) -> Generator[Event, None, None]:
    """Every event after `after`, for ever. Resumes by `seq`; unknown types are passed over."""
    waits, since = delays(), time.monotonic()
    while True:
        failure: ServerUnreachable | ApiError
        connected = False
        try:
            with closing(_frames(connection, session_path, after)) as frames:
                for frame in frames:
                    connected = True
                    seq = frame.data.get("seq")
                    if frame.event == "snapshot" or not isinstance(seq, int) or seq <= after:
                        continue
                    if seq > after + 1:
                        # An event was lost on the way: read on from the last one that arrived.
                        break
                    waits, since = delays(), time.monotonic()
                    after = seq
                    event = parse_event(frame.data)
                    if event is not None:
                        yield event
            since = time.monotonic() if connected else since
            failure = ConnectionLost("the server ended the stream")
        except (ServerUnreachable, Unavailable) as error:
            failure = error
        wait = next(waits)
        if time.monotonic() - since + wait > connection.retry_secs:
            raise failure
        sleep(wait)


def _frames(connection: Connection, session_path: str, after: int) -> Generator[Frame, None, None]:
    """The frames of one connection; ends when it breaks."""
    frames = Frames()
    with connection.open(
        "GET",
        f"{session_path}/events",
        query={"after": after},
        accept="text/event-stream",
    ) as response:
        try:
            for chunk in response.iter_raw():
                for frame in frames.feed(chunk):
                    yield frame
        except httpx.TransportError:
            return
