"""Text for terminals. Pure. Events contain untrusted text: nothing of it may control a terminal."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# Bidirectional controls reorder the text around them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def sanitize(text: str) -> str:
    """The text without escape sequences and control characters; newlines and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE.sub("", text).replace("\r\n", "\n"))


def one_line(text: str, most: int = 120) -> str:
    """The first line that is not empty, shortened."""
    line = next((line for line in sanitize(text).splitlines() if line.strip()), "").strip()
    return line if len(line) <= most else line[: most - 1] + "…"
