"""Generates `_sync` from `_async`: `python scripts/make_sync.py`; `--check` only compares.

The source uses names that have a counterpart each. What has none is in `compat.py`, of which both
packages have their own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src/harvest_client"
BY_HAND = {"compat.py"}

REPLACEMENTS = [
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bGenerator\[(.+?), None\]", r"Generator[\1, None, None]"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAsyncClient\b", "Client"),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\bAwaitable, ", ""),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\baclosing\b", "closing"),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\baclose\(", "close("),
    (r"\baread\(", "read("),
    (r"\baiter_raw\(", "iter_raw("),
    (r"\basynchronous\b", "synchronous"),
    (r"\b_async\b", "_sync"),
]


def convert(source: str) -> str:
    """The synchronous form of a module."""
    for pattern, replacement in REPLACEMENTS:
        source = re.sub(pattern, replacement, source)
    return formatted(source)


def formatted(source: str) -> str:
    """The source in the form that `ruff format` gives it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(PACKAGE / "x.py")]
    run = subprocess.run([*command, "-"], input=source, capture_output=True, text=True, check=True)
    return run.stdout


def wanted() -> dict[Path, str]:
    """The generated files with their content."""
    files = {}
    for source in sorted((PACKAGE / "_async").glob("*.py")):
        if source.name not in BY_HAND:
            text = source.read_text("utf-8")
            files[PACKAGE / "_sync" / source.name] = (
                f"# Generated from _async/{source.name} by scripts/make_sync.py: do not edit.\n"
                + convert(text)
            )
    files[PACKAGE / "_sync/__init__.py"] = '"""Generated: see `scripts/make_sync.py`."""\n'
    return files


def main() -> int:
    """Writes the files, or compares them."""
    check, stale = "--check" in sys.argv[1:], []
    for path, text in wanted().items():
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(path)
            if not check:
                path.write_text(text, "utf-8")
    for path in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(PACKAGE)}")
    if check and stale:
        print("hint: python scripts/make_sync.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
