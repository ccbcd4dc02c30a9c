"""Progress of long operations, for a person at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from .text import one_line

Progress = bool | Callable[[str], None] | None


def reporter(progress: Progress) -> Callable[[str], None]:
    """Where lines of progress go: to stderr if it is a terminal, unless told otherwise."""
    if callable(progress):
        return progress
    shown = sys.stderr.isatty() if progress is None else progress
    return _print if shown else _ignore


def build_line(line: Mapping[str, Any]) -> str:
    """A line of a build's answer as text; empty for lines that say nothing to a person."""
    kind = line.get("type")
    if kind in {"progress", "warning", "failed"}:
        message = one_line(str(line.get("message", "")))
        return message if kind == "progress" else f"{kind}: {message}"
    if kind == "install_step":
        failure = line.get("failure")
        took = f" ({int(line.get('millis', 0)) / 1000:.1f} s)"
        return one_line(str(line.get("command", ""))) + (f": {failure}" if failure else took)
    if kind == "egress_refused":
        return f"refused a connection to {one_line(str(line.get('name', '')))}"
    return ""


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ignore(text: str) -> None:
    return
