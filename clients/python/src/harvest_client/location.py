"""Finds the server and its token: arguments, then the environment, then the local server."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import ServerUnreachable
from .secret import Secret, secret

_HINT = "start one with `harvest up`, or set HARVEST_URL and HARVEST_TOKEN"


@dataclass(frozen=True)
class Location:
    """Where the server is. The token is sent to this URL only."""

    url: str
    token: Secret | None
    # Whether the URL comes from the record of a local server, which a restart may change.
    local: bool

    @property
    def loopback(self) -> bool:
        """Whether the server is on this machine."""
        return re.match(r"https?://(127\.|localhost[:/]|\[::1\])", self.url + "/") is not None


def home() -> Path:
    """The folder of the local installation."""
    given = os.environ.get("HARVEST_HOME")
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local/state"
    return base / "harvest"


def locate(url: str | None = None, token: str | Secret | None = None) -> Location:
    """The server to talk to; raises `ServerUnreachable` when none is known."""
    chosen = url or os.environ.get("HARVEST_URL")
    key = secret(token) or secret(os.environ.get("HARVEST_TOKEN"))
    if key is not None and not (key.reveal().isascii() and key.reveal().isprintable()):
        raise ValueError("the token has characters that no token has")
    if chosen:
        chosen = chosen.rstrip("/")
        if not re.match(r"https?://[^@/]+(/[^@]*)?$", chosen):
            raise ValueError("the URL of the server must be http(s)://HOST[:PORT], without a login")
        if key is None and chosen == local_url():
            key = local_token()
        return Location(chosen, key, local=False)
    found = local_url()
    if found is None:
        raise ServerUnreachable(f"no server runs from {home()}", _HINT)
    return Location(found, key or local_token(), local=True)


def local_url() -> str | None:
    """The URL in the record of the local server, if it has one."""
    try:
        record = json.loads((home() / "server.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    url = record.get("url") if isinstance(record, dict) else None
    return url.rstrip("/") if isinstance(url, str) else None


def local_token() -> Secret | None:
    """The token that the local server keeps for its own user."""
    try:
        return secret((home() / "token").read_text("utf-8").strip())
    except OSError:
        return None
