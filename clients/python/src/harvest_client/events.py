"""Events of a session. Each prints as text that a person wants to read: `print(event, end="")`.

A stream lays its events out one after the other (`Layout`), so that a line never begins in the
middle of the agent's text. Events of types that are not listed here are passed over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .decode import decode
from .models import Exit, Usage, status_of
from .text import one_line, sanitize


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a session; `seq` numbers its events without gaps."""

    seq: int
    at: datetime
    turn: str | None = None
    # Set by a stream: the text with the line ends that the place in the stream needs.
    _laid_out: str | None = field(default=None, init=False, repr=False, compare=False)

    def line(self) -> str:
        """One or more lines for a person; empty for events that only programs need."""
        return ""

    def __str__(self) -> str:
        return sanitize(self.line()) if self._laid_out is None else self._laid_out


@dataclass(frozen=True, kw_only=True)
class StateChanged(Event):
    """The session has another state."""

    state: str
    reason: str
    detail: str | None = None

    @property
    def status(self) -> str:
        """The state in the documents' words."""
        return status_of(self.state, self.reason)

    def line(self) -> str:
        if self.state == "failed":
            return f"Failed: {one_line(self.detail or self.reason)}"
        if self.state == "queued" and self.reason != "created":
            return f"Waiting for a free slot ({self.reason})"
        return ""


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """The session waits for a slot."""

    position: int


@dataclass(frozen=True, kw_only=True)
class PromptQueued(Event):
    """A prompt was accepted."""

    prompt: str
    text: str
    author: str


@dataclass(frozen=True, kw_only=True)
class PromptCancelled(Event):
    """A prompt was removed from the queue."""

    prompt: str

    def line(self) -> str:
        return f"Removed {self.prompt} from the queue"


@dataclass(frozen=True, kw_only=True)
class PromptMoved(Event):
    """A prompt has another position in the queue."""

    prompt: str
    position: int


@dataclass(frozen=True, kw_only=True)
class SandboxStarted(Event):
    """A sandbox started for the session."""

    sandbox: str
    epoch: int
    source: str = field(metadata={"json": "from"})
    way: str
    millis: int


@dataclass(frozen=True, kw_only=True)
class SandboxEnded(Event):
    """The session's sandbox ended."""

    sandbox: str
    reason: str


@dataclass(frozen=True)
class BootFailure:
    """Why a boot phase failed."""

    message: str
    permanent: bool


@dataclass(frozen=True, kw_only=True)
class BootPhase(Event):
    """A phase of the sandbox's boot began or ended."""

    phase: str
    status: str
    millis: int | None = None
    tail: str | None = None
    failure: BootFailure | None = None

    def line(self) -> str:
        return f"Failed: {one_line(self.failure.message)}" if self.failure else ""


@dataclass(frozen=True)
class SyncedCheckout:
    """A checkout after a sync, with the commits before and after it."""

    repository: str
    before: str | None = None
    after: str | None = None


@dataclass(frozen=True, kw_only=True)
class Synced(Event):
    """The checkouts are at the newest commits of their bases."""

    checkouts: tuple[SyncedCheckout, ...]
    millis: int


@dataclass(frozen=True)
class CheckoutSync:
    """What a requested sync did to a checkout."""

    repository: str
    outcome: str
    branch: str | None = None
    upstream: str | None = None
    before: str | None = None
    after: str | None = None
    snapshot: str | None = None
    files: int = 0
    checkpoint: str | None = None
    conflicts: tuple[str, ...] = ()
    commit: str | None = None
    error: str | None = None
    next: str | None = None


@dataclass(frozen=True, kw_only=True)
class SyncEnded(Event):
    """A requested sync ended."""

    checkouts: tuple[CheckoutSync, ...]
    millis: int

    def line(self) -> str:
        failed = (one for one in self.checkouts if one.error or one.conflicts)
        lines = [
            f"{one.repository}: {one_line(one.error or 'conflict in ' + ', '.join(one.conflicts))}"
            for one in failed
        ]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class WorkSaved(Event):
    """Harvest committed and pushed work that the agent had left behind at the end of its turn."""

    repository: str
    files: int = 0
    snapshot: str | None = None
    pushed: str | None = None
    error: str | None = None

    def line(self) -> str:
        if self.error:
            return f"Not pushed: {one_line(self.error)}"
        return f"Saved {self.files} uncommitted files in {self.repository}" if self.files else ""


@dataclass(frozen=True, kw_only=True)
class RepositoryConfig(Event):
    """A checkout's base commit has a `.harvest/config.toml`, which says this."""

    repository: str
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class InstallStep(Event):
    """A command that installed dependencies."""

    folder: str
    manager: str
    command: str
    millis: int
    failure: str | None = None
    tail: str = ""

    def line(self) -> str:
        return f"Failed: {self.command}: {one_line(self.failure)}" if self.failure else ""


@dataclass(frozen=True, kw_only=True)
class TurnStarted(Event):
    """The execution of a prompt began."""

    prompt: str
    number: int


@dataclass(frozen=True, kw_only=True)
class TextDelta(Event):
    """Part of the agent's text."""

    text: str

    def line(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class ThoughtDelta(Event):
    """Part of the agent's thoughts; prints as nothing."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ToolStarted(Event):
    """The agent called a tool."""

    call: str
    name: str
    kind: str
    input: Any = None
    parent: str | None = None

    def line(self) -> str:
        return f"● {one_line(self.name)} {_argument(self.input)}".rstrip()


@dataclass(frozen=True, kw_only=True)
class ToolOutput(Event):
    """Output of a running tool."""

    call: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ToolEnded(Event):
    """A tool call ended."""

    call: str
    ok: bool
    output: str

    def line(self) -> str:
        return "" if self.ok else f"  failed: {one_line(self.output)}"


@dataclass(frozen=True, kw_only=True)
class RequestOpened(Event):
    """The agent asks a question; the next prompt is the answer."""

    request: str
    question: str
    options: tuple[str, ...]

    def line(self) -> str:
        options = f" ({' / '.join(one_line(option) for option in self.options)})"
        return f"? {self.question}{options if self.options else ''}"


@dataclass(frozen=True, kw_only=True)
class RequestClosed(Event):
    """A question was answered or withdrawn."""

    request: str
    answer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Blocked(Event):
    """The agent reports that it cannot go on."""

    criterion: str
    error: str
    needed_action: str
    attempts: tuple[str, ...]
    checkpoint: str | None = None

    def line(self) -> str:
        error, needed = one_line(self.error), one_line(self.needed_action)
        return f"Blocked: {one_line(self.criterion)}\n  because: {error}\n  needed:  {needed}"


@dataclass(frozen=True, kw_only=True)
class Artifact(Event):
    """The agent handed over a file."""

    name: str
    bytes: int
    media_type: str

    def line(self) -> str:
        return f"Handed over {one_line(self.name)} ({self.bytes} bytes)"


@dataclass(frozen=True, kw_only=True)
class Retry(Event):
    """The agent waits before it calls its model again."""

    attempt: int
    after_millis: int
    status: int | None = None

    def line(self) -> str:
        return f"Waiting {self.after_millis / 1000:.1f} s for the model (attempt {self.attempt})"


@dataclass(frozen=True, kw_only=True)
class AgentReady(Event):
    """The agent started."""

    version: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class PlanStep:
    """A step of the agent's plan."""

    text: str
    status: str


@dataclass(frozen=True, kw_only=True)
class Plan(Event):
    """The agent's plan."""

    steps: tuple[PlanStep, ...]

    def line(self) -> str:
        done = sum(step.status == "completed" for step in self.steps)
        following = next((step.text for step in self.steps if step.status != "completed"), "")
        return f"Plan, {done} of {len(self.steps)} done: {one_line(following)}".rstrip(": ")


@dataclass(frozen=True, kw_only=True)
class Title(Event):
    """The session has a title."""

    title: str


@dataclass(frozen=True, kw_only=True)
class Compacted(Event):
    """The agent compacted its conversation."""


@dataclass(frozen=True, kw_only=True)
class AgentExited(Event):
    """The agent's process ended."""

    exit: Exit
    tail: str
    restarts: bool

    def line(self) -> str:
        following = "restarting it" if self.restarts else "it is not restarted"
        return f"The agent exited ({self.exit.how}); {following}"


@dataclass(frozen=True, kw_only=True)
class TurnEnded(Event):
    """The execution of a prompt ended."""

    prompt: str
    outcome: str
    millis: int
    error: str | None = None
    reason: str | None = None

    def line(self) -> str:
        if self.outcome == "completed":
            return ""
        why = one_line(self.error or self.reason or "", 400)
        return f"Turn {self.outcome}: {why}".rstrip(": ")


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken(Event):
    """The session's disk was saved."""

    snapshot_id: str
    kind: str
    millis: int


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """The session continues from a former turn."""

    detail: str
    snapshot_id: str | None = None

    def line(self) -> str:
        return f"Restored: {one_line(self.detail)}"


@dataclass(frozen=True, kw_only=True)
class ModelCall(Event):
    """A call to a model ended."""

    upstream: str
    model: str
    status: int
    millis: int
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class EgressRefused(Event):
    """The network policy refused a connection."""

    name: str
    reason: str
    hint: str | None = None

    def line(self) -> str:
        refused = f"Refused a connection to {one_line(self.name)}: {one_line(self.reason)}"
        return f"{refused}\n  {one_line(self.hint)}" if self.hint else refused


@dataclass(frozen=True, kw_only=True)
class Pushed(Event):
    """A commit was pushed."""

    repository: str
    branch: str
    commit: str

    def line(self) -> str:
        return f"Pushed {one_line(self.branch)} at {self.commit[:8]} to {self.repository}"


@dataclass(frozen=True, kw_only=True)
class PushRefused(Event):
    """A push was refused."""

    repository: str
    reason: str

    def line(self) -> str:
        return f"Refused a push to {self.repository}: {one_line(self.reason)}"


@dataclass(frozen=True, kw_only=True)
class PrOpened(Event):
    """A pull request was opened."""

    repository: str
    number: int
    url: str
    branch: str

    def line(self) -> str:
        return f"Opened pull request {self.number}: {one_line(self.url, 400)}"


@dataclass(frozen=True, kw_only=True)
class PrSkipped(Event):
    """No pull request was opened for a pushed branch, or an open one was not updated."""

    repository: str
    reason: str
    hint: str | None = None

    def line(self) -> str:
        return f"Pull request of {self.repository}: {one_line(self.reason)}"


@dataclass(frozen=True, kw_only=True)
class PrChanged(Event):
    """A pull request was merged, closed or opened again."""

    repository: str
    number: int
    url: str
    state: str

    def line(self) -> str:
        return f"Pull request {self.number} is {self.state}"


@dataclass(frozen=True, kw_only=True)
class EvidenceRecorded(Event):
    """Harvest ran the repository's check on a pushed commit."""

    repository: str
    commit: str
    check: str
    outcome: str
    exit: Exit
    millis: int
    tail: str
    checked_at: datetime

    def line(self) -> str:
        if self.outcome == "none_declared":
            return ""
        return f"Check {self.outcome} on {self.commit[:8]}"


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A warning of the platform."""

    message: str

    def line(self) -> str:
        return f"warning: {one_line(self.message, 400)}"


@dataclass(frozen=True, kw_only=True)
class AgentRaw(Event):
    """A line of the agent that its adapter does not know."""

    raw: str = field(default="", metadata={"json": "line"})


EVENT_TYPES: dict[str, type[Event]] = {
    "state_changed": StateChanged,
    "waiting": Waiting,
    "prompt_queued": PromptQueued,
    "prompt_cancelled": PromptCancelled,
    "prompt_moved": PromptMoved,
    "sandbox_started": SandboxStarted,
    "sandbox_ended": SandboxEnded,
    "boot_phase": BootPhase,
    "synced": Synced,
    "sync_ended": SyncEnded,
    "work_saved": WorkSaved,
    "repository_config": RepositoryConfig,
    "install_step": InstallStep,
    "turn_started": TurnStarted,
    "text_delta": TextDelta,
    "thought_delta": ThoughtDelta,
    "tool_started": ToolStarted,
    "tool_output": ToolOutput,
    "tool_ended": ToolEnded,
    "request_opened": RequestOpened,
    "request_closed": RequestClosed,
    "blocked": Blocked,
    "artifact": Artifact,
    "retry": Retry,
    "agent_ready": AgentReady,
    "plan": Plan,
    "title": Title,
    "compacted": Compacted,
    "agent_exited": AgentExited,
    "turn_ended": TurnEnded,
    "snapshot_taken": SnapshotTaken,
    "restored": Restored,
    "model_call": ModelCall,
    "egress_refused": EgressRefused,
    "pushed": Pushed,
    "push_refused": PushRefused,
    "pr_opened": PrOpened,
    "pr_skipped": PrSkipped,
    "pr_changed": PrChanged,
    "evidence": EvidenceRecorded,
    "warning": Warned,
    "agent_raw": AgentRaw,
}


def parse_event(data: dict[str, object]) -> Event | None:
    """The event; `None` for a type that this version does not know."""
    kind = EVENT_TYPES.get(str(data.get("type")))
    return None if kind is None else decode(kind, data)


class Layout:
    """Gives events their line ends: lines stand alone, the agent's text flows."""

    def __init__(self) -> None:
        self._mid_line = False

    def place(self, event: Event) -> None:
        """Sets what the event prints as."""
        text = sanitize(event.line())
        if not isinstance(event, TextDelta) and text:
            text = ("\n" if self._mid_line else "") + text + "\n"
        if text:
            self._mid_line = not text.endswith("\n")
        object.__setattr__(event, "_laid_out", text)


def _argument(value: object) -> str:
    """The most telling argument of a tool call, on one line."""
    if isinstance(value, dict):
        for name in ("command", "file_path", "filePath", "path", "pattern", "url", "query"):
            if isinstance(value.get(name), str):
                return one_line(value[name])
    return one_line(json.dumps(value, ensure_ascii=False)) if value else ""
