"""`HarvestSandbox`: a session seen as its sandbox."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from ..errors import HarvestError
from ..events import Event
from ..results import ExecResult, Reply
from ..secret import Secret
from .client import HarvestClient
from .compat import finish
from .session import HarvestSession


class HarvestSandbox:
    """The sandbox of a session: `HarvestSandbox(session_id, repo_owner, repo_name)` or
    `HarvestSandbox(HarvestSession(...))`, then `start()`.
    """

    def __init__(
        self,
        session_id: str | HarvestSession,
        repo_owner: str | None = None,
        repo_name: str | None = None,
        branch: str | None = None,
        *,
        client: HarvestClient | None = None,
    ) -> None:
        if isinstance(session_id, HarvestSession):
            self.session = session_id
        else:
            self.session = HarvestSession(session_id, repo_owner, repo_name, branch)
        self._own = client is None
        self._client = client or HarvestClient()
        self.session.bind(self._client)

    def __repr__(self) -> str:
        return f"HarvestSandbox({self.session!r})"

    @property
    def session_id(self) -> str | None:
        """The session's id."""
        return self.session.session_id

    @property
    def repo_path(self) -> str:
        """The checkout in the sandbox."""
        repositories = self.session.info.repositories
        return repositories[0].folder if repositories else "/workspace"

    async def start(
        self,
        github_token: str | Secret | None = None,
        user_email: str | None = None,
        user_name: str | None = None,
    ) -> HarvestSandbox:
        """Creates or resumes the session and waits until its sandbox is ready."""
        github_token = Secret(github_token) if github_token else None
        options = self.session.options
        options.add_secrets({"github_token": github_token})
        options.user_email = user_email or options.user_email
        options.user_name = user_name or options.user_name
        await self.session.start()
        await self.session.wait_until_running()
        await self.session.set_author()
        return self

    async def start_from_snapshot(
        self,
        snapshot_id: str,
        github_token: str | Secret | None = None,
        user_email: str | None = None,
        user_name: str | None = None,
    ) -> HarvestSandbox:
        """Like `start`, with the disk of a snapshot."""
        self.session.options.snapshot = snapshot_id
        return await self.start(github_token, user_email, user_name)

    async def __aenter__(self) -> HarvestSandbox:
        if not self.session.started:
            await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.session.__aexit__(kind, error, traceback)
        finally:
            await finish(self.close)

    async def close(self) -> None:
        """Closes the connections; the sandbox stays as it is."""
        if self._own:
            await self._client.close()

    async def send_prompt(self, prompt: str) -> Reply:
        """Sends a prompt, waits for the end of its turn and returns the agent's text."""
        return await self.session.send_prompt(prompt)

    async def send_prompt_stream(self, prompt: str) -> AsyncGenerator[Event, None]:
        """Sends a prompt and yields its events."""
        async with aclosing(self.session.send_prompt_stream(prompt)) as events:
            async for event in events:
                yield event

    async def exec(
        self, *argv: str, timeout_secs: float | None = None, cwd: str | None = None
    ) -> ExecResult:
        """Runs a command in the checkout and returns its whole output."""
        return await self.session.exec(*argv, timeout_secs=timeout_secs, cwd=cwd)

    async def snapshot(self) -> str:
        """Saves the disk; returns the id of the snapshot."""
        return await self.session.snapshot()

    async def terminate(self) -> None:
        """Stops the sandbox. The session keeps its disk and its history."""
        if not self.session.started:
            raise HarvestError("the sandbox is not started", "call `start()` first")
        await self.session.terminate()
        await self.close()
