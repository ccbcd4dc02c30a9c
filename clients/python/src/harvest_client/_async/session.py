"""A session: a conversation with an agent in its own sandbox."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
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
                "enter its context with `async with`, or call `await session.start()`",
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

    async def _id(self) -> str:
        if self._info is None and self._lookup is not None:
            self._adopt(await find(self._connect(), self._lookup))
        return self.info.id

    async def _path(self, rest: str = "") -> str:
        return f"/v1/sessions/{await self._id()}{rest}"

    async def _apply(self, verb: str, body: object = None) -> Session:
        answer = await self._connect().json("POST", await self._path(f"/{verb}"), body=body)
        return self._adopt(decode(Session, answer))

    # Its life

    async def start(self) -> HarvestSession:
        """Creates the session, or finds the one with the same `session_id`."""
        if self._info is None and self._lookup is None:
            connection, key = self._connect(), self.options.session_id
            known = await lookup(connection, key) if key else None
            if known is None:
                self._adopt(await self._create(connection))
            else:
                await self._reuse(known)
        return self

    async def _create(self, connection: Connection) -> Session:
        taken: KeyTaken | None = None
        body = self.options.body()
        try:
            return decode(Session, await connection.create("/v1/sessions", body=body))
        except KeyTaken as error:
            # Another process created it just now.
            taken = error
        except NotFound:
            if not self.options.repository:
                raise
        if taken is not None:
            known = await lookup(connection, self.options.session_id or "")
            if known is None:
                raise taken
            await self._reuse(known)
            return self.info
        body = self.options.body(by_url=True)
        return decode(Session, await connection.create("/v1/sessions", body=body))

    async def _reuse(self, known: Session) -> None:
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
            path = await self._path(f"/secrets/{quote(name, safe='')}")
            await self._connect().bytes("PUT", path, body={"value": value})

    async def __aenter__(self) -> HarvestSession:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._info is None:
            return
        try:
            await finish(self._leave)
        except (HarvestError, OSError):
            # The error of the body says more; the session pauses by itself when it is idle.
            if error is None:
                raise

    async def _leave(self) -> None:
        info = await self.refresh()
        if info.state not in {"paused", "failed", "archived"}:
            await self.pause()

    async def refresh(self) -> Session:
        """Asks the server for the session's current state."""
        return self._adopt(decode(Session, await self._connect().json("GET", await self._path())))

    async def wait_until_running(self) -> Session:
        """Waits until the sandbox is ready; resumes a paused session first."""
        info = await self.refresh()
        if info.state == "paused":
            info = await self._apply("resume")
        if info.status == "starting":
            async with aclosing(follow(self._connect(), info.id, info.seq)) as events:
                async for event in events:
                    if isinstance(event, StateChanged) and event.status != "starting":
                        break
            info = await self.refresh()
        if info.status != "running":
            raise SessionEnded(
                f"the session is {info.state}: {await self._why(info)}",
                state=info.state,
                reason=info.reason,
                hint=f"`harvest logs {info.id}` shows what happened",
            )
        return info

    async def set_author(self) -> None:
        """Makes the session's user the author of commits that are made before the first prompt."""
        author = self.options.author
        if author is not None:
            for name, value in (
                ("name", f"{author['name']} (Harvest)"),
                ("email", author["email"]),
            ):
                await self.exec("git", "config", "--global", f"user.{name}", value)

    async def sandbox_id(self) -> str | None:
        """The id of its sandbox; `None` while it has none, such as in the queue for a slot."""
        info = await self.refresh()
        if info.sandbox is None and info.state == "queued":
            async with aclosing(follow(self._connect(), info.id, info.seq)) as events:
                async for event in events:
                    if isinstance(event, StateChanged | Waiting):
                        break
            info = await self.refresh()
        return info.sandbox

    async def _why(self, info: Session) -> str:
        query = {"after": max(0, info.seq - 20), "limit": 20}
        page = await self._connect().json("GET", await self._path("/events"), query=query)
        events = [parse_event(item) for item in page.get("items", [])]
        details = [event.detail for event in events if isinstance(event, StateChanged)]
        return next((detail for detail in reversed(details) if detail), info.reason)

    async def stop(self) -> Session:
        """Stops the current turn; the sandbox and the queue stay."""
        return await self._apply("stop")

    async def pause(self) -> str:
        """Saves the disk and stops the sandbox; returns the id of the snapshot."""
        answer = await self._connect().json("POST", await self._path("/pause"))
        self._adopt(decode(Session, answer.get("session")))
        return str(answer.get("snapshot_id"))

    async def restore(self, turn: int | None = None) -> Session:
        """Resumes a paused session and waits until it runs; or goes back to the end of a turn."""
        if turn is not None:
            await self._apply("restore", {"turn": turn})
        return await self.wait_until_running()

    async def terminate(self) -> Session:
        """Stops the sandbox at once, even during a turn; its disk is saved."""
        return await self._apply("terminate")

    async def delete(self) -> None:
        """Deletes the session with its sandbox, snapshots and history."""
        await self._connect().bytes("DELETE", await self._path())

    # Prompts

    async def send_prompt_stream(
        self, prompt: str, *, model: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Sends a prompt and yields its events; each prints as text: `print(chunk, end="")`.

        Ends with the turn, or with a question of the agent; the next prompt is then the answer.
        Raises `TurnFailed` at the end of a turn that did not complete.
        """
        tracker = await self._send(prompt, model)
        async with aclosing(self._track(tracker)) as events:
            async for event in events:
                yield event

    async def send_prompt(self, prompt: str, *, model: str | None = None) -> Reply:
        """Sends a prompt, waits for the end of its turn and returns the agent's text."""
        tracker = await self._send(prompt, model)
        async with aclosing(self._track(tracker)) as events:
            async for _ in events:
                pass
        return Reply.of(
            tracker.text,
            prompt_id=tracker.prompt_id,
            turn_id=tracker.turn,
            question=tracker.question,
        )

    async def queue_prompt(self, prompt: str, *, model: str | None = None) -> Prompt:
        """Sends a prompt without waiting for its turn."""
        given = {"text": prompt, "model": model, "author": self.options.author}
        body = {name: value for name, value in given.items() if value is not None}
        path = await self._path("/prompts")
        return decode(Prompt, await self._connect().create(path, body=body))

    async def _send(self, prompt: str, model: str | None) -> PromptTracker:
        queued = await self.queue_prompt(prompt, model=model)
        return PromptTracker(queued.id, prompt, after=queued.seq)

    async def _track(self, tracker: PromptTracker) -> AsyncGenerator[Event, None]:
        layout = Layout()
        async with aclosing(follow(self._connect(), self.id, tracker.after)) as events:
            async for event in events:
                if tracker.take(event):
                    layout.place(event)
                    yield event
                if tracker.done:
                    break
        await self.refresh()
        if tracker.failure is not None:
            raise tracker.failure

    async def events(
        self, after: int = 0, *, follow_new: bool = False
    ) -> AsyncGenerator[Event, None]:
        """The events after number `after`; with `follow_new` also those to come."""
        path = await self._path("/events")
        while not follow_new:
            page = await self._connect().json("GET", path, query={"after": after, "limit": 1000})
            items = page.get("items", [])
            for item in items:
                event = parse_event(item)
                if event is not None:
                    yield event
            if not items or page.get("next_cursor") is None:
                return
            after = int(items[-1]["seq"])
        async with aclosing(follow(self._connect(), await self._id(), after)) as events:
            async for event in events:
                yield event

    async def turns(self) -> list[Turn]:
        """All turns, oldest first."""
        page = await self._connect().json("GET", await self._path("/turns"))
        return [decode(Turn, item) for item in page.get("items", [])]

    # Its sandbox

    async def exec(
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
        lines = self._connect().lines("POST", await self._path("/exec"), body=body)
        async with aclosing(lines):
            async for line in lines:
                output.take(line)
        return output.exec_result()

    async def snapshot(self) -> str:
        """Saves the disk while the session goes on; returns the id of the snapshot."""
        info = await self.refresh()
        if info.sandbox is None:
            if info.snapshot_id is None:
                raise HarvestError("the session has no disk yet", "send a prompt first")
            return info.snapshot_id
        path = f"/v1/sandboxes/{info.sandbox}/snapshot"
        refused: Forbidden | None = None
        try:
            return str((await self._connect().create(path)).get("id"))
        except Forbidden as error:
            refused = error
        raise Forbidden(
            "only admins may save the disk of a running session",
            "`pause()` saves it too and stops the sandbox; the next prompt resumes it",
            code=refused.code,
            status=refused.status,
            request_id=refused.request_id,
        )

    async def snapshots(self) -> list[Snapshot]:
        """The snapshots that the session keeps."""
        page = await self._connect().json("GET", await self._path("/snapshots"))
        return [decode(Snapshot, item) for item in page.get("items", [])]

    async def diff(self, turn: int | None = None) -> str:
        """The changes since the session's start as a unified diff, or those of one turn."""
        query = {"turn": turn}
        path = await self._path("/diff")
        data = await self._connect().bytes("GET", path, query=query, accept="text/x-diff")
        return data.decode("utf-8", "replace")

    async def fork(
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
        page = await self._connect().create(await self._path("/fork"), body=body)
        forks = [decode(Session, item) for item in page.get("items", [])]
        return [HarvestSession.existing(self._connect(), fork) for fork in forks]

    # Its pull request

    async def pull_request(self) -> PullRequest | None:
        """The session's pull request, if it has one."""
        try:
            answer = await self._connect().json("GET", await self._path("/pr"))
        except NotFound as error:
            if error.code == "no_pr":
                return None
            raise
        return decode(PullRequest, answer)

    async def create_pull_request(
        self, title: str | None = None, body: str | None = None
    ) -> PullRequest:
        """Pushes the committed work and opens the pull request, or updates the one there is.

        Harvest runs the repository's check on the pushed commit after the next turn.
        """
        pushed = await self.exec("git", "push", "origin", "HEAD")
        if pushed.returncode != 0:
            raise HarvestError(f"the push failed: {pushed.stderr.strip()}")
        given = {"title": title, "body": body}
        arguments = {name: text for name, text in given.items() if text is not None}
        called = await self.exec(*tools_door.call("create_pull_request", arguments))
        if called.returncode != 0:
            raise HarvestError(f"the pull request was not opened: {called.stderr.strip()}")
        tools_door.check("create_pull_request", called.stdout)
        opened = await self.pull_request()
        if opened is None:
            raise HarvestError("the pull request was not opened")
        return opened


async def lookup(connection: Connection, key: str) -> Session | None:
    """The session with the caller's key, if it exists."""
    page = await connection.json("GET", "/v1/sessions", query={"key": key})
    items = page.get("items", [])
    return decode(Session, items[0]) if items else None


async def find(connection: Connection, name: str) -> Session:
    """The session with this key or id."""
    known = await lookup(connection, name)
    if known is not None:
        return known
    path = f"/v1/sessions/{quote(name, safe='')}"
    return decode(Session, await connection.json("GET", path))
