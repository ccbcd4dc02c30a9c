"""The life of a session: its creation, its state, its pauses and its end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from ..decode import decode
from ..errors import HarvestError, KeyTaken, NotFound, NotStarted, SessionEnded
from ..events import StateChanged, Waiting, parse_event
from ..models import Session
from ..options import SessionOptions, micros
from ..secret import Secret
from .compat import finish
from .connection import Connection
from .files import Files
from .stream import follow

if TYPE_CHECKING:
    from .client import HarvestClient

_Kind = TypeVar("_Kind", bound="SessionLife")


class SessionLife:
    """What a session is made from and known by, and how it begins, rests and ends."""

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
        pr: str | None = None,
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
            pr_mode=pr,
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
        # The key or id of a session that exists but was not read yet.
        self._existing: str | None = None

    @classmethod
    def existing(cls: type[_Kind], connection: Connection, info: Session | str) -> _Kind:
        """A session of the server, by its description, its id or its caller's key."""
        session = cls()
        session._connection = connection
        if isinstance(info, Session):
            session._adopt(info)
        else:
            session._existing = info
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
            return self.options.session_id or self._existing
        return self._info.key or self._info.id

    @property
    def status(self) -> str:
        """`starting`, `running`, `paused`, `terminated` or `failed`, as last seen."""
        return self.info.status

    @property
    def files(self) -> Files:
        """The files of its sandbox."""
        return Files(self._connect(), self._path)

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

    def _path(self, rest: str = "") -> str:
        """The path of the session or of a part of it; a key means the same as the id."""
        name = self._existing if self._info is None and self._existing else self.info.id
        return f"/v1/sessions/{quote(name, safe='')}{rest}"

    async def _apply(self, verb: str, body: object = None) -> Session:
        answer = await self._connect().json("POST", self._path(f"/{verb}"), body=body)
        return self._adopt(decode(Session, answer))

    # Its life

    async def start(self: _Kind) -> _Kind:
        """Creates the session, or finds the one with the same `session_id`."""
        if self._info is None and self._existing is not None:
            await self.refresh()
        if self._info is None:
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
            path = self._path(f"/secrets/{quote(name, safe='')}")
            await self._connect().bytes("PUT", path, body={"value": value})

    async def __aenter__(self: _Kind) -> _Kind:
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
        return self._adopt(decode(Session, await self._connect().json("GET", self._path())))

    async def wait_until_running(self) -> Session:
        """Waits until the sandbox is ready; resumes a paused session first."""
        info = await self.refresh()
        if info.state == "paused":
            info = await self._apply("resume")
        if info.status == "starting":
            async with aclosing(follow(self._connect(), self._path(), info.seq)) as events:
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

    async def sandbox_id(self) -> str | None:
        """The id of its sandbox; `None` while it has none, such as in the queue for a slot."""
        info = await self.refresh()
        if info.sandbox is None and info.state == "queued":
            async with aclosing(follow(self._connect(), self._path(), info.seq)) as events:
                async for event in events:
                    if isinstance(event, StateChanged | Waiting):
                        break
            info = await self.refresh()
        return info.sandbox

    async def _why(self, info: Session) -> str:
        query = {"after": max(0, info.seq - 20), "limit": 20}
        page = await self._connect().json("GET", self._path("/events"), query=query)
        events = [parse_event(item) for item in page.get("items", [])]
        details = [event.detail for event in events if isinstance(event, StateChanged)]
        return next((detail for detail in reversed(details) if detail), info.reason)

    async def stop(self) -> Session:
        """Stops the current turn; the sandbox and the queue stay."""
        return await self._apply("stop")

    async def pause(self) -> str:
        """Saves the disk and stops the sandbox; returns the id of the snapshot."""
        answer = await self._connect().json("POST", self._path("/pause"))
        self._adopt(decode(Session, answer.get("session")))
        return str(answer.get("snapshot_id"))

    async def restore(self, turn: int | None = None, *, snapshot: str | None = None) -> Session:
        """Resumes a paused session and waits until it runs; or goes back to the end of a turn, or
        to a snapshot of this session.
        """
        given = {"turn": turn, "snapshot_id": snapshot}
        point = {name: value for name, value in given.items() if value is not None}
        if point:
            await self._apply("restore", point)
        return await self.wait_until_running()

    async def terminate(self) -> Session:
        """Stops the sandbox at once, even during a turn; its disk is saved."""
        return await self._apply("terminate")

    async def delete(self) -> None:
        """Deletes the session with its sandbox, snapshots and history."""
        await self._connect().bytes("DELETE", self._path())


async def lookup(connection: Connection, key: str) -> Session | None:
    """The session with the caller's key, if it exists."""
    try:
        found = await connection.json("GET", f"/v1/sessions/{quote(key, safe='')}")
    except NotFound:
        return None
    return decode(Session, found)
