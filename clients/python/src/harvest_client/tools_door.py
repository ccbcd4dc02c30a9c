"""Calls of Harvest's own tools from inside a sandbox, where they need no token. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import HarvestError, ProtocolError

_URL = "http://mcp.harvest.internal/mcp"


def call(tool: str, arguments: Mapping[str, Any]) -> list[str]:
    """The command that calls a tool."""
    request = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": tool, "arguments": dict(arguments)},
    }
    headers = ["content-type: application/json", "accept: application/json, text/event-stream"]
    options = [part for header in headers for part in ("--header", header)]
    return ["curl", "--silent", "--show-error", *options, "--data", json.dumps(request), _URL]


def check(tool: str, answer: str) -> None:
    """Raises when the answer says that the call failed."""
    try:
        message = json.loads(answer)
        result = message.get("result") or {}
        refusal = message.get("error", {}).get("message")
        if result.get("isError"):
            refusal = " ".join(part.get("text", "") for part in result.get("content", []))
    except (ValueError, AttributeError, TypeError):
        raise ProtocolError(f"the answer of {tool} is not understood") from None
    if refusal or not result:
        raise HarvestError(f"{tool} failed: {refusal or 'no result'}")
