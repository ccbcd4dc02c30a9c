# Generated from _async/session.py by scripts/make_sync.py: do not edit.
"""A session: a conversation with an agent in its own sandbox."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .. import tools_door
from ..decode import decode
from ..errors import (
    Forbidden,
    HarvestError,
    KeyTaken,
    NotFound,
    NotStarted,
    SessionEnded,
)
from ..events import Event, Layout, StateChanged, Waiting, parse_event
from ..models import Prompt, PullRequest, Session, Snapshot, Turn
from ..options import SessionOptions, micros, timeout_millis
from ..results import ExecResult, Output, Reply
from ..secret import Secret
from ..turns import PromptTracker
from .compat import finish
from .connection import Connection
from .files import Files
from .stream import follow

if TYPE_CHECKING:
    from .client import HarvestClient


class HarvestSession:
    """A session. It is created on the server by `start()`, or by entering its context.

    Leaving the context pauses it: its disk and conversation are saved, and the next prompt
    continues. With a `session_id` of the caller, creating it again gives the same session.
    """

    def __init__(
        self,
        session_id: str | None = None,
        repo_owner: str | None = None,
        repo_name: str | None = None,
        branch: str | None = None,
        *,
        agent: str | None = None,
        model: str | None = None,
        user_name: str | None = None,
        user_email: str | None = None,
        github_token: str | Secret | None = None,
        claude_oauth_token: str | Secret | None = None,
        anthropic_api_key: str | Secret | None = None,
        openai_api_key: str | Secret | None = None,
        gemini_api_key: str | Secret | None = None,
        sentry_auth_token: str | Secret | None = None,
        linear_api_key: str | Secret | None = None,
        snapshot: str | None = None,
        network: str | None = None,
        env: Mapping[str, str] | None = None,
        budget: float | str | Decimal | None = None,
        client: HarvestClient | None = None,
    ) -> None:
        self.options = SessionOptions(
            session_id=session_id,
            repo_owner=repo_owner,
            repo_name=repo_name,
            branch=branch,
            agent=agent,
            model=model,
            user_name=user_name,
            user_email=user_email,
            snapshot=snapshot,
            network=network,
            env=dict(env or {}),
            budget_micros=micros(budget),
        )
        self.options.add_secrets(
            {
                "github_token": github_token,
                "claude_oauth_token": claude_oauth_token,
                "anthropic_api_key": anthropic_api_key,
                "openai_api_key": openai_api_key,
                "gemini_api_key": gemini_api_key,
                "sentry_auth_token": sentry_auth_token,
                "linear_api_key": linear_api_key,
            }
        )
        self._connection: Connection | None = client.connection if client else None
        self._info: Session | None = None
        # The key of a session that exists but was not looked up yet.
        self._lookup: str | None = None

    @classmethod
    def existing(cls, connection: Connection, info: Session | str) -> HarvestSession:
        """A session of the server, by its description, its id or its caller's key."""
        session = cls()
        session._connection = connection
        if isinstance(info, Session):
            session._adopt(info)
        else:
            session._lookup = info
        return session

    def __repr__(self) -> str:
        if self._info is None:
            return f"<HarvestSession {self.session_id or self.options.repository!r} not started>"
        return f"<HarvestSession {self.session_id} {self.status}>"

    # What is known of the session

    @property
    def started(self) -> bool:
        """Whether the session is known to exist on the server."""
        return self._info is not None

    @property
    def info(self) -> Session:
        """The session as the server last described it; `refresh()` asks again."""
        if self._info is None:
            raise NotStarted(
                "the session is not started",
                "enter its context with `with`, or call `session.start()`",
            )
        return self._info

    @property
    def id(self) -> str:
        """The server's id, `ses_…`."""
        return self.info.id

    @property
    def session_id(self) -> str | None:
        """The caller's id if it was given, else the server's."""
        if self._info is None:
            return self.options.session_id or self._lookup
        return self._info.key or self._info.id

    @property
    def status(self) -> str:
        """`starting`, `running`, `paused`, `terminated` or `failed`, as last seen."""
        return self.info.status

    @property
    def files(self) -> Files:
        """The files of its sandbox."""
        return Files(self._connect(), self._id)

    def bind(self, client: HarvestClient) -> None:
        """Sets the client of a session that was made without one."""
        if self._connection is None:
            self._connection = client.connection

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = Connection(None, None)
        return self._connection

    def _adopt(self, info: Session) -> Session:
        self._info = info
        return info

    def _id(self) -> str:
        if self._info is None and self._lookup is not None:
            self._adopt(find(self._connect(), self._lookup))
        return self.info.id

    def _path(self, rest: str = "") -> str:
        return f"/v1/sessions/{self._id()}{rest}"

    def _apply(self, verb: str, body: object = None) -> Session:
        answer = self._connect().json("POST", self._path(f"/{verb}"), body=body)
        return self._adopt(decode(Session, answer))

    # Its life

    def start(self) -> HarvestSession:
        """Creates the session, or finds the one with the same `session_id`."""
        if self._info is None and self._lookup is None:
            connection, key = self._connect(), self.options.session_id
            known = lookup(connection, key) if key else None
            if known is None:
                self._adopt(self._create(connection))
            else:
                self._reuse(known)
        return self

    def _create(self, connection: Connection) -> Session:
        taken: KeyTaken | None = None
        body = self.options.body()
        try:
            return decode(Session, connection.create("/v1/sessions", body=body))
        except KeyTaken as error:
            # Another process created it just now.
            taken = error
        except NotFound:
            if not self.options.repository:
                raise
        if taken is not None:
            known = lookup(connection, self.options.session_id or "")
            if known is None:
                raise taken
            self._reuse(known)
            return self.info
        body = self.options.body(by_url=True)
        return decode(Session, connection.create("/v1/sessions", body=body))

    def _reuse(self, known: Session) -> None:
        wanted = self.options.repository
        if wanted and known.repository and wanted.lower() != known.repository.lower():
            raise KeyTaken(
                f"session `{known.key}` works on {known.repository}, not on {wanted}",
                "choose another session_id",
                code="key_taken",
                status=409,
            )
        self._adopt(known)
        for name, value in self.options.secrets.items():
            path = self._path(f"/secrets/{quote(name, safe='')}")
            self._connect().bytes("PUT", path, body={"value": value})

    def __enter__(self) -> HarvestSession:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._info is None:
            return
        try:
            finish(self._leave)
        except (HarvestError, OSError):
            # The error of the body says more; the session pauses by itself when it is idle.
            if error is None:
                raise

    def _leave(self) -> None:
        info = self.refresh()
        if info.state not in {"paused", "failed", "archived"}:
            self.pause()

    def refresh(self) -> Session:
        """Asks the server for the session's current state."""
        return self._adopt(decode(Session, self._connect().json("GET", self._path())))

    def wait_until_running(self) -> Session:
        """Waits until the sandbox is ready; resumes a paused session first."""
        info = self.refresh()
        if info.state == "paused":
            info = self._apply("resume")
        if info.status == "starting":
            with closing(follow(self._connect(), info.id, info.seq)) as events:
                for event in events:
                    if isinstance(event, StateChanged) and event.status != "starting":
                        break
            info = self.refresh()
        if info.status != "running":
            raise SessionEnded(
                f"the session is {info.state}: {self._why(info)}",
                state=info.state,
                reason=info.reason,
                hint=f"`harvest logs {info.id}` shows what happened",
            )
        return info

    def set_author(self) -> None:
        """Makes the session's user the author of commits that are made before the first prompt."""
        author = self.options.author
        if author is not None:
            for name, value in (
                ("name", f"{author['name']} (Harvest)"),
                ("email", author["email"]),
            ):
                self.exec("git", "config", "--global", f"user.{name}", value)

    def sandbox_id(self) -> str | None:
        """The id of its sandbox; `None` while it has none, such as in the queue for a slot."""
        info = self.refresh()
        if info.sandbox is None and info.state == "queued":
            with closing(follow(self._connect(), info.id, info.seq)) as events:
                for event in events:
                    if isinstance(event, StateChanged | Waiting):
                        break
            info = self.refresh()
        return info.sandbox

    def _why(self, info: Session) -> str:
        query = {"after": max(0, info.seq - 20), "limit": 20}
        page = self._connect().json("GET", self._path("/events"), query=query)
        events = [parse_event(item) for item in page.get("items", [])]
        details = [event.detail for event in events if isinstance(event, StateChanged)]
        return next((detail for detail in reversed(details) if detail), info.reason)

    def stop(self) -> Session:
        """Stops the current turn; the sandbox and the queue stay."""
        return self._apply("stop")

    def pause(self) -> str:
        """Saves the disk and stops the sandbox; returns the id of the snapshot."""
        answer = self._connect().json("POST", self._path("/pause"))
        self._adopt(decode(Session, answer.get("session")))
        return str(answer.get("snapshot_id"))

    def restore(self, turn: int | None = None) -> Session:
        """Resumes a paused session and waits until it runs; or goes back to the end of a turn."""
        if turn is not None:
            self._apply("restore", {"turn": turn})
        return self.wait_until_running()

    def terminate(self) -> Session:
        """Stops the sandbox at once, even during a turn; its disk is saved."""
        return self._apply("terminate")

    def delete(self) -> None:
        """Deletes the session with its sandbox, snapshots and history."""
        self._connect().bytes("DELETE", self._path())

    # Prompts

    def send_prompt_stream(
        self, prompt: str, *, model: str | None = None
    ) -> Generator[Event, None, None]:
        """Sends a prompt and yields its events; each prints as text: `print(chunk, end="")`.

        Ends with the turn, or with a question of the agent; the next prompt is then the answer.
        Raises `TurnFailed` at the end of a turn that did not complete.
        """
        tracker = self._send(prompt, model)
        with closing(self._track(tracker)) as events:
            for event in events:
                yield event

    def send_prompt(self, prompt: str, *, model: str | None = None) -> Reply:
        """Sends a prompt, waits for the end of its turn and returns the agent's text."""
        tracker = self._send(prompt, model)
        with closing(self._track(tracker)) as events:
            for _ in events:
                pass
        return Reply.of(
            tracker.text,
            prompt_id=tracker.prompt_id,
            turn_id=tracker.turn,
            question=tracker.question,
        )

    def queue_prompt(self, prompt: str, *, model: str | None = None) -> Prompt:
        """Sends a prompt without waiting for its turn."""
        given = {"text": prompt, "model": model, "author": self.options.author}
        body = {name: value for name, value in given.items() if value is not None}
        path = self._path("/prompts")
        return decode(Prompt, self._connect().create(path, body=body))

    def _send(self, prompt: str, model: str | None) -> PromptTracker:
        queued = self.queue_prompt(prompt, model=model)
        return PromptTracker(queued.id, prompt, after=queued.seq)

    def _track(self, tracker: PromptTracker) -> Generator[Event, None, None]:
        layout = Layout()
        with closing(follow(self._connect(), self.id, tracker.after)) as events:
            for event in events:
                if tracker.take(event):
                    layout.place(event)
                    yield event
                if tracker.done:
                    break
        self.refresh()
        if tracker.failure is not None:
            raise tracker.failure

    def events(self, after: int = 0, *, follow_new: bool = False) -> Generator[Event, None, None]:
        """The events after number `after`; with `follow_new` also those to come."""
        path = self._path("/events")
        while not follow_new:
            page = self._connect().json("GET", path, query={"after": after, "limit": 1000})
            items = page.get("items", [])
            for item in items:
                event = parse_event(item)
                if event is not None:
                    yield event
            if not items or page.get("next_cursor") is None:
                return
            after = int(items[-1]["seq"])
        with closing(follow(self._connect(), self._id(), after)) as events:
            for event in events:
                yield event

    def turns(self) -> list[Turn]:
        """All turns, oldest first."""
        page = self._connect().json("GET", self._path("/turns"))
        return [decode(Turn, item) for item in page.get("items", [])]

    # Its sandbox

    def exec(
        self,
        *argv: str,
        timeout_secs: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Runs a command in the first checkout and returns its whole output."""
        if not argv:
            raise ValueError("exec needs a program")
        body: dict[str, Any] = {"argv": list(argv), "env": dict(env or {})}
        extra = {"timeout_millis": timeout_millis(timeout_secs), "cwd": cwd, "user": user}
        body.update({name: value for name, value in extra.items() if value is not None})
        output = Output()
        lines = self._connect().lines("POST", self._path("/exec"), body=body)
        with closing(lines):
            for line in lines:
                output.take(line)
        return output.exec_result()

    def snapshot(self) -> str:
        """Saves the disk while the session goes on; returns the id of the snapshot."""
        info = self.refresh()
        if info.sandbox is None:
            if info.snapshot_id is None:
                raise HarvestError("the session has no disk yet", "send a prompt first")
            return info.snapshot_id
        path = f"/v1/sandboxes/{info.sandbox}/snapshot"
        refused: Forbidden | None = None
        try:
            return str((self._connect().create(path)).get("id"))
        except Forbidden as error:
            refused = error
        raise Forbidden(
            "only admins may save the disk of a running session",
            "`pause()` saves it too and stops the sandbox; the next prompt resumes it",
            code=refused.code,
            status=refused.status,
            request_id=refused.request_id,
        )

    def snapshots(self) -> list[Snapshot]:
        """The snapshots that the session keeps."""
        page = self._connect().json("GET", self._path("/snapshots"))
        return [decode(Snapshot, item) for item in page.get("items", [])]

    def diff(self, turn: int | None = None) -> str:
        """The changes since the session's start as a unified diff, or those of one turn."""
        query = {"turn": turn}
        path = self._path("/diff")
        data = self._connect().bytes("GET", path, query=query, accept="text/x-diff")
        return data.decode("utf-8", "replace")

    def fork(
        self,
        n: int | None = None,
        *,
        turn: int | None = None,
        prompt: str | None = None,
        prompts: Sequence[str] = (),
    ) -> list[HarvestSession]:
        """Sessions that continue from the end of a turn, or from the current state."""
        given = {"count": n, "turn": turn, "prompt": prompt, "prompts": list(prompts) or None}
        body = {name: value for name, value in given.items() if value is not None}
        page = self._connect().create(self._path("/fork"), body=body)
        forks = [decode(Session, item) for item in page.get("items", [])]
        return [HarvestSession.existing(self._connect(), fork) for fork in forks]

    # Its pull request

    def pull_request(self) -> PullRequest | None:
        """The session's pull request, if it has one."""
        try:
            answer = self._connect().json("GET", self._path("/pr"))
        except NotFound as error:
            if error.code == "no_pr":
                return None
            raise
        return decode(PullRequest, answer)

    def create_pull_request(self, title: str | None = None, body: str | None = None) -> PullRequest:
        """Pushes the committed work and opens the pull request, or updates the one there is.

        Harvest runs the repository's check on the pushed commit after the next turn.
        """
        pushed = self.exec("git", "push", "origin", "HEAD")
        if pushed.returncode != 0:
            raise HarvestError(f"the push failed: {pushed.stderr.strip()}")
        given = {"title": title, "body": body}
        arguments = {name: text for name, text in given.items() if text is not None}
        called = self.exec(*tools_door.call("create_pull_request", arguments))
        if called.returncode != 0:
            raise HarvestError(f"the pull request was not opened: {called.stderr.strip()}")
        tools_door.check("create_pull_request", called.stdout)
        opened = self.pull_request()
        if opened is None:
            raise HarvestError("the pull request was not opened")
        return opened


def lookup(connection: Connection, key: str) -> Session | None:
    """The session with the caller's key, if it exists."""
    page = connection.json("GET", "/v1/sessions", query={"key": key})
    items = page.get("items", [])
    return decode(Session, items[0]) if items else None


def find(connection: Connection, name: str) -> Session:
    """The session with this key or id."""
    known = lookup(connection, name)
    if known is not None:
        return known
    path = f"/v1/sessions/{quote(name, safe='')}"
    return decode(Session, connection.json("GET", path))
