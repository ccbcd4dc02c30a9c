"""The programs and commands of the README and of the guide run as they are written."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
import types
import uuid
import venv
from pathlib import Path

import pytest

import harvest_client

from .host import ROOT, Host

README = ROOT / "clients/python/README.md"
GUIDE = ROOT / "docs/python.md"


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def run(program: str, *interpreter: str) -> str:
    """Runs a program in a process of its own and returns its output."""
    source = os.pathsep.join([str(ROOT / "clients/python/src")])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": source, "PATH": path}
    command = [*interpreter, program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_readme_programs_run(environment: None, host: Host) -> None:
    first, second = blocks(README, "python")
    assert "tests pass" in run(first, sys.executable, "-c")
    printed = run(second, sys.executable, "-c")
    assert re.match(r"True snp_\w+\n.*\n\w+ Begin\n", printed, re.S), printed
    (command,) = blocks(README, "sh")
    assert run(command, "sh", "-c") == "0 42\n\n"


async def test_front_page_program_runs(
    environment: None, closed_afterwards: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks(ROOT / "README.md", "python")
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    names = {"__name__": "readme", "HarvestClient": harvest_client.HarvestClient}
    await types.FunctionType(compile(program, "README.md", "exec", flags=flags), names)()
    assert "tests pass" in capsys.readouterr().out


async def test_guide_programs_run(environment: None, closed_afterwards: None) -> None:
    programs = blocks(GUIDE, "python")
    assert len(programs) >= 6
    names: dict[str, object] = {"__name__": "guide"}
    printed = io.StringIO()
    for number, program in enumerate(programs):
        # The session of the second program ends with its context; the third goes on with it.
        text = textwrap.dedent(program).replace("task-42", f"task-{uuid.uuid4()}")
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(text, f"{GUIDE.name}, program {number + 1}", "exec", flags=flags)
        with contextlib.redirect_stdout(printed):
            running = types.FunctionType(code, names)()
            if inspect.isawaitable(running):
                await running
    assert "0 hello\n" in printed.getvalue()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="pip needs the network: once is enough")
def test_quickstart_installs_the_client(tmp_path: Path) -> None:
    steps = (ROOT / "crates/harvest/src/quickstart/next_steps.txt").read_text("utf-8")
    (command,) = re.findall(r"^  (pip .*)$", steps, re.M)
    venv.create(tmp_path, with_pip=True)
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    program = f"{command}\npython -c 'from harvest_client.sync import HarvestClient'"
    installed = subprocess.run(
        ["sh", "-ec", program],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_named_methods_exist(page: Path) -> None:
    known = {"python", "print", "pip"}
    things = [getattr(harvest_client, name) for name in harvest_client.__all__]
    for thing in things:
        known.update(dir(thing))
    known.update(harvest_client.__all__)
    for name in re.findall(r"`(?:client\.|session\.)?(\w+)\([^`]*\)`", page.read_text("utf-8")):
        assert name in known, f"{page.name} names `{name}`"
