"""Resources of the API, as far as the client uses them; checked against `openapi.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

# The documents' words for the states of a session. `failed` is the server's own.
STATUS_OF_STATE = {
    "queued": "starting",
    "starting": "starting",
    "running": "running",
    "idle": "running",
    "needs_input": "running",
    "paused": "paused",
    "failed": "failed",
    "archived": "terminated",
}


def status_of(state: str, reason: str) -> str:
    """`starting`, `running`, `paused`, `terminated` or `failed`."""
    if state == "paused" and reason == "terminated":
        return "terminated"
    return STATUS_OF_STATE.get(state, state)


@dataclass(frozen=True)
class Author:
    """A person whose name the commits carry."""

    name: str
    email: str


@dataclass(frozen=True)
class Usage:
    """Tokens of model calls."""

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code`, `signal`, `oom`, `timeout` or `killed`."""

    how: str
    value: int | None = None

    @property
    def returncode(self) -> int:
        """The code that a shell would report; 124 after a timeout, 137 after a kill."""
        if self.how == "code":
            return self.value or 0
        if self.how == "signal":
            return 128 + (self.value or 0)
        return 124 if self.how == "timeout" else 137

    @property
    def status(self) -> str:
        """`completed`, `signal`, `oom`, `timeout` or `killed`."""
        return "completed" if self.how == "code" else self.how


@dataclass(frozen=True)
class Evidence:
    """The result of the repository's check on a pushed commit, run by Harvest itself."""

    repository: str
    commit: str
    check: str
    outcome: str
    exit: Exit
    millis: int
    tail: str
    checked_at: datetime


@dataclass(frozen=True)
class PullRequest:
    """A pull request at the repository's forge."""

    number: int
    url: str
    title: str
    body: str
    state: str
    branch: str
    base: str
    commit: str
    evidence: Evidence | None = None


@dataclass(frozen=True)
class SessionRepository:
    """A repository of a session with its checkout."""

    name: str
    folder: str
    url: str
    branch: str
    base: str | None = None
    pr: PullRequest | None = None


@dataclass(frozen=True)
class Session:
    """A session as the server describes it."""

    id: str
    title: str
    state: str
    reason: str
    branch: str
    agent: str
    author: Author
    seq: int
    turns: int
    queued: int
    created_at: datetime
    last_activity: datetime
    spent_micros: int
    usage: Usage
    repositories: tuple[SessionRepository, ...]
    key: str | None = None
    model: str | None = None
    repository: str | None = None
    repo_owner: str | None = None
    repo_name: str | None = None
    sandbox: str | None = None
    snapshot_id: str | None = None
    forked_from: str | None = None
    budget_micros: int | None = None
    pr_number: int | None = None
    pr_url: str | None = None

    @property
    def status(self) -> str:
        """The state in the documents' words."""
        return status_of(self.state, self.reason)


@dataclass(frozen=True)
class Prompt:
    """A message in a session's queue."""

    id: str
    text: str
    status: str
    seq: int
    turn: str | None = None
    position: int | None = None


@dataclass(frozen=True)
class DiffStat:
    """Numbers of changed files and lines."""

    files: int
    insertions: int
    deletions: int


@dataclass(frozen=True)
class Turn:
    """The execution of one prompt."""

    id: str
    number: int
    prompt: str
    text: str
    started_at: datetime
    spent_micros: int
    usage: Usage
    outcome: str | None = None
    reason: str | None = None
    ended_at: datetime | None = None
    snapshot_id: str | None = None
    diff: DiffStat | None = None


@dataclass(frozen=True)
class Snapshot:
    """The disk of a session, saved."""

    id: str
    kind: str
    created_at: datetime
    durable: bool
    pinned: bool
    gone: bool
    turn: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class FileStat:
    """A file or folder in a sandbox."""

    name: str
    kind: str
    size: int
    mode: int
    uid: int
    modified: datetime
    target: str | None = None


@dataclass(frozen=True)
class Build:
    """A repository prepared as a snapshot."""

    snapshot_id: str
    commit: str
    millis: int
    built_at: datetime
    package_manager: str | None = None


@dataclass(frozen=True)
class Repository:
    """A git remote that Harvest works on."""

    name: str
    url: str
    created_at: datetime
    base: str | None = None
    image: str | None = None
    secret: str | None = None
    build: Build | None = None


@dataclass(frozen=True)
class ScheduleRun:
    """A run over all repositories."""

    status: str
    timestamp: datetime
    image_rebuilt: bool
    attempts: int
    tail: str
    rebuilt: tuple[str, ...] = field(default=())
