"""Results of commands, prompts and builds."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict

from .decode import decode
from .errors import ProtocolError
from .events import RequestOpened
from .models import Exit

# The return code of commands that Harvest could not run, as the CLI has it.
NOT_RUN = 125

LANGUAGES = ("python", "node", "bash")


@dataclass(frozen=True)
class ExecResult:
    """How a command ended, with its whole output. `"text" in result` looks into its stdout.

    `status` is `completed`, `signal`, `timeout`, `oom`, `killed`, or `failed` when it did not run.
    """

    returncode: int
    stdout: str
    stderr: str
    duration_secs: float
    status: str = "completed"

    def __contains__(self, text: str) -> bool:
        return text in self.stdout


@dataclass(frozen=True)
class ExecutionResult(ExecResult):
    """The result of code that ran in a sandbox of its own."""

    sandbox_id: str = ""


@dataclass
class Output:
    """Collects the lines of a command's answer."""

    sandbox_id: str = ""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    ended: bool = False
    returncode: int = NOT_RUN
    status: str = "failed"
    duration_secs: float = 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        """Adds a line; lines of unknown types are passed over."""
        kind = line.get("type")
        if kind == "started":
            self.sandbox_id = str(line.get("sandbox", ""))
        elif kind == "stdout":
            self.stdout += _bytes(line)
        elif kind == "stderr":
            self.stderr += _bytes(line)
        elif kind == "exited":
            ended = decode(Exit, line.get("exit"))
            self.ended, self.returncode, self.status = True, ended.returncode, ended.status
            self.duration_secs = float(line.get("millis", 0)) / 1000
            if line.get("reason"):
                self.say(str(line["reason"]))
        elif kind == "failed":
            self.ended = True
            self.say(str(line.get("message", "the command failed")))

    def say(self, message: str) -> None:
        """Adds a line of Harvest's own to stderr."""
        if self.stderr and not self.stderr.endswith(b"\n"):
            self.stderr += b"\n"
        self.stderr += f"harvest: {message}\n".encode()

    def exec_result(self) -> ExecResult:
        """The result of a command in a session."""
        return ExecResult(
            self.returncode,
            self.stdout.decode("utf-8", "replace"),
            self.stderr.decode("utf-8", "replace"),
            self.duration_secs,
            self.status,
        )

    def execution_result(self) -> ExecutionResult:
        """The result of code in a sandbox of its own."""
        return ExecutionResult(
            self.returncode,
            self.stdout.decode("utf-8", "replace"),
            self.stderr.decode("utf-8", "replace"),
            self.duration_secs,
            self.status,
            self.sandbox_id,
        )


def _bytes(line: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(str(line.get("data", "")), validate=True)
    except binascii.Error:
        raise ProtocolError("the server's answer is not understood: output is no base64") from None


class Reply(str):
    """What the agent wrote in a turn. `question` is set when it waits for an answer."""

    __slots__ = ("prompt_id", "question", "turn_id")

    prompt_id: str
    turn_id: str | None
    question: RequestOpened | None

    @classmethod
    def of(
        cls, text: str, *, prompt_id: str, turn_id: str | None, question: RequestOpened | None
    ) -> Reply:
        """A reply with its context."""
        reply = cls(text)
        reply.prompt_id, reply.turn_id, reply.question = prompt_id, turn_id, question
        return reply


@dataclass
class SessionState:
    """A session as a `SessionManager` keeps it: the manager updates it in place."""

    session_id: str
    repo_owner: str
    repo_name: str
    branch: str
    status: str
    created_at: datetime
    last_activity: datetime
    snapshot_id: str | None = None
    pr_number: int | None = None
    pr_url: str | None = None


class BuildResult(TypedDict, total=False):
    """The result of a build. `error` and `hint` are there when it failed."""

    success: bool
    status: str
    snapshot_id: str | None
    repo: str
    branch: str | None
    package_manager: str | None
    commit: str | None
    duration_secs: float
    error: str
    hint: str | None
