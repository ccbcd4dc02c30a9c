"""The client without an event loop, and that it is generated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harvest_client import ExecutionResult
from harvest_client.sync import HarvestClient, HarvestSandbox, SandboxExecutor, SessionManager

from .conftest import script
from .host import Host

PACKAGE = Path(__file__).parent.parent


def test_generated_code_is_up_to_date() -> None:
    command = [sys.executable, str(PACKAGE / "scripts/make_sync.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_blocking_session(environment: None) -> None:
    with HarvestClient() as client:
        with client.create_session("owner", "repo", agent="scripted", network="none") as session:
            prompt = script({"text": "Hello."}, {"bash": "echo x > x"})
            text = "".join(str(chunk) for chunk in session.send_prompt_stream(prompt))
            assert text.endswith("Hello.\n● Bash echo x > x\n")
            assert "x" in session.exec("cat", "x")
            assert session.files.read("x") == b"x\n"
            assert session.send_prompt(script({"text": "Bye."})) == "Bye."
            assert [event.seq for event in session.events()][:3] == [1, 2, 3]
        assert session.status == "paused"
        assert session.id in {other.id for other in client.sessions(state="paused")}
        session.delete()


def test_blocking_executor_sandbox_and_manager(environment: None, host: Host) -> None:
    result = SandboxExecutor().execute("print(6 * 7)", timeout_secs=30)
    assert isinstance(result, ExecutionResult)
    assert result.stdout == "42\n"
    manager = SessionManager(HarvestClient(host.url, host.token))
    state = manager.create_session("owner", "repo", "main", session_id="blocking-1")
    assert state.status == "running"
    with HarvestSandbox("blocking-1", "owner", "repo") as sandbox:
        assert "README.md" in sandbox.exec("ls")
    manager.terminate_session(state.session_id)
    assert state.status == "terminated"
    manager.client.close()
