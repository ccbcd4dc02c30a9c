"""The programs of the documents that describe the package, unchanged but for their imports.

They are data in `documents/`; names that a document leaves open are given here. The sandboxes of
all run real Claude Code; a stand-in answers for the model service.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from .host import Host, Model

DOCUMENTS = sorted((Path(__file__).parent / "documents").glob("*.txt"))

OPEN_NAMES = {
    "token": "ghp_xxx",
    "github_token": "ghp_xxx",
    "email": "dave@example.org",
    "name": "Dave C",
}

PRINTED = {
    "agent_session": f"{Model.TEXT}\n[^$]*3 passing",
    "build_images": "Build success: True",
    "create_sandbox": r"\{'sandbox_id': 'sbx_\w+', .*'status': 'warming'\}",
    "execute": "Exit code: 0\nOutput: Hello from sandbox\n",
    "executor_tests": "passed",
    "register": "",
    "sandbox_tests": "passed",
    "session_tests": "passed",
    "stream": Model.TEXT,
    "trigger_build": r"\{'success': True, 'status': 'success', 'snapshot_id': 'snp_\w+'",
}


def with_our_imports(program: str) -> str:
    """The program with other import lines and nothing else changed."""
    lines = program.splitlines()
    for number, line in enumerate(lines):
        if line == "import modal":
            lines[number] = "import harvest_client as modal"
        elif line.startswith("from "):
            lines[number] = re.sub(r"from (modal|modal_executor) ", "from harvest_client ", line)
    return "\n".join(lines)


@pytest.fixture
def clean(host: Host) -> Iterator[None]:
    """Removes the sessions that a program made: all use the same ids."""
    yield
    for session in host.api("GET", "sessions?limit=200")["items"]:
        if session["key"]:
            host.api("DELETE", f"sessions/{session['id']}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name.split(".")[0])
async def test_program_runs(
    document: Path, environment: None, clean: None, closed_afterwards: None
) -> None:
    program = with_our_imports(document.read_text("utf-8"))
    code = compile(program, document.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        # What Modal needs is ignored with a warning.
        warnings.simplefilter("ignore", UserWarning)
        running = types.FunctionType(code, {"__name__": "program", **OPEN_NAMES})()
        if inspect.isawaitable(running):
            await running
    assert re.search(PRINTED[document.name.split(".")[0]], printed.getvalue()), printed.getvalue()


def test_every_program_has_an_expectation() -> None:
    assert {path.name.split(".")[0] for path in DOCUMENTS} == set(PRINTED)
