# Generated from _async/connection.py by scripts/make_sync.py: do not edit.
"""Requests to the server: retries, idempotency keys, streamed answers.

A POST is repeated only with its idempotency key, or when the connection was refused and nothing was
sent. Exceptions of httpx do not leave this module: their frames hold headers and bodies with
secrets. They are replaced outside of their `except` block, so that no traceback refers to them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from ..errors import ApiError, ConnectionLost, ServerUnreachable, api_error
from ..location import Location, locate
from ..retry import FIRST_CONTACT_SECS, delays, is_repeatable, may_repeat
from ..secret import Secret
from ..wire import Lines, json_object
from .compat import Client, current_loop, sleep

# The server sends something at least every 15 s in each stream.
STREAM_SILENCE_SECS = 60.0
# Saving a large disk takes minutes.
ANSWER_SECS = 600.0


class Connection:
    """The requests of one client."""

    def __init__(
        self, url: str | None, token: str | Secret | None, *, retry_secs: float = 60.0
    ) -> None:
        self._given = (url, Secret(token) if token else None)
        self._location: Location | None = None
        self._http: Client | None = None
        self._loop: object = None
        self._answered = False
        self.retry_secs = retry_secs

    def __repr__(self) -> str:
        return f"Connection({self._location.url if self._location else self._given[0]!r})"

    @property
    def location(self) -> Location:
        """Where the server is."""
        if self._location is None:
            self._location = locate(*self._given)
        return self._location

    def close(self) -> None:
        """Closes the connections; the next request opens new ones."""
        http, self._http = self._http, None
        if http is not None and self._loop is current_loop():
            http.close()

    def _client(self) -> Client:
        # Connections belong to the event loop that opened them.
        if self._http is None or self._loop is not current_loop():
            # A proxy of the environment cannot reach this machine's own loopback. Without TLS the
            # certificates of the machine are not read, which takes longer than most requests.
            tls = self.location.url.startswith("https:")
            self._http = Client(trust_env=not self.location.loopback, verify=tls)
            self._loop = current_loop()
        return self._http

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: object,
        content: bytes | None,
        query: Mapping[str, Any] | None,
        key: str | None,
        accept: str,
        read_secs: float,
    ) -> httpx.Request:
        data = _dump(body) if body is not None else content
        location = self.location
        headers = {"accept": accept, "accept-encoding": "identity"}
        if location.token:
            headers["authorization"] = f"Bearer {location.token.reveal()}"
        if key is not None:
            headers["idempotency-key"] = key
        if body is not None:
            headers["content-type"] = "application/json"
        elif content is not None:
            headers["content-type"] = "application/octet-stream"
        given = {name: _query(value) for name, value in (query or {}).items() if value is not None}
        return self._client().build_request(
            method,
            location.url + path,
            params=given or None,
            headers=headers,
            content=data,
            timeout=httpx.Timeout(read_secs, connect=10.0, pool=None),
        )

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        content: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        key: str | None = None,
        accept: str = "application/json",
        read_secs: float = STREAM_SILENCE_SECS,
    ) -> Iterator[httpx.Response]:
        """The answer to a request, once its head is there; raises `ApiError` for a refusal."""
        response = self._send(
            method,
            path,
            body=body,
            content=content,
            query=query,
            key=key,
            accept=accept,
            read_secs=read_secs,
        )
        try:
            yield response
        finally:
            response.close()

    def _send(self, method: str, path: str, *, key: str | None, **parts: Any) -> httpx.Response:
        repeatable = is_repeatable(method, key)
        waits, began = delays(), time.monotonic()
        while True:
            failure: ServerUnreachable | ApiError
            retry_after = 0.0
            try:
                request = self._request(method, path, key=key, **parts)
                response = self._client().send(request, stream=True)
                self._answered = True
                if response.is_success:
                    return response
                content = response.read()
                response.close()
                failure = api_error(response.status_code, content)
                again = may_repeat(failure, repeatable=repeatable)
                retry_after = _seconds(response.headers.get("retry-after"))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                failure, again = self._unreachable(), True
            except (httpx.TransportError, httpx.InvalidURL) as error:
                failure, again = self._lost(type(error).__name__), repeatable
            patience = self.retry_secs
            if not self._answered:
                patience = min(patience, FIRST_CONTACT_SECS)
            wait = max(next(waits), retry_after)
            if not again or time.monotonic() - began + wait > patience:
                raise failure
            sleep(wait)
            self._relocate()

    def _unreachable(self) -> ServerUnreachable:
        return ServerUnreachable(
            f"no server answers at {self.location.url}",
            "start it with `harvest up`, or set HARVEST_URL and HARVEST_TOKEN",
        )

    def _lost(self, how: str) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self.location.url} broke ({how})",
            "the request may have had its effect: look before you repeat it",
        )

    def _relocate(self) -> None:
        # A restarted local server may listen on another port.
        if self._location is not None and self._location.local:
            try:
                self._location = locate(*self._given)
            except ServerUnreachable:
                return

    def bytes(self, method: str, path: str, **parts: Any) -> bytes:
        """The whole body of the answer."""
        parts.setdefault("read_secs", ANSWER_SECS)
        waits, began = delays(), time.monotonic()
        while True:
            failure: ConnectionLost | None = None
            with self.open(method, path, **parts) as response:
                try:
                    return response.read()
                except httpx.TransportError as error:
                    failure = self._lost(type(error).__name__)
            wait = next(waits)
            late = time.monotonic() - began + wait > self.retry_secs
            if late or not is_repeatable(method, parts.get("key")):
                raise failure
            sleep(wait)

    def json(self, method: str, path: str, **parts: Any) -> dict[str, Any]:
        """The JSON object of the answer; an empty one without a body."""
        body = self.bytes(method, path, **parts)
        return json_object(body) if body else {}

    def create(self, path: str, **parts: Any) -> dict[str, Any]:
        """A POST that is safe to repeat: it carries a new idempotency key."""
        return self.json("POST", path, key=uuid.uuid4().hex, **parts)

    def lines(self, method: str, path: str, **parts: Any) -> Generator[dict[str, Any], None, None]:
        """The JSON lines of a streamed answer; raises `ConnectionLost` when it breaks off."""
        lines = Lines()
        failure: ConnectionLost | None = None
        with self.open(method, path, accept="application/x-ndjson", **parts) as response:
            try:
                for chunk in response.iter_raw():
                    for line in lines.feed(chunk):
                        if line:
                            yield json_object(line)
            except httpx.TransportError as error:
                failure = self._lost(type(error).__name__)
        if failure is not None:
            raise failure
        if not lines.complete:
            raise self._lost("in the middle of a line")

    def pages(self, path: str, query: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The items of all pages of a list."""
        cursor: object = None
        while True:
            page = self.json("GET", path, query={**query, "cursor": cursor})
            for item in page.get("items", []):
                yield item
            cursor = page.get("next_cursor")
            if cursor is None:
                return


def _query(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dump(body: object) -> bytes:
    """JSON; secrets are revealed here and nowhere else."""
    return json.dumps(body, default=_reveal).encode()


def _reveal(value: object) -> str:
    if isinstance(value, Secret):
        return value.reveal()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
