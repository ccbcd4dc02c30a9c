# Generated from _async/sandbox.py by scripts/make_sync.py: do not edit.
"""`HarvestSandbox`: a session seen as its sandbox."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
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

    def start(
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
        self.session.start()
        self.session.wait_until_running()
        self.session.set_author()
        return self

    def start_from_snapshot(
        self,
        snapshot_id: str,
        github_token: str | Secret | None = None,
        user_email: str | None = None,
        user_name: str | None = None,
    ) -> HarvestSandbox:
        """Like `start`, with the disk of a snapshot."""
        self.session.options.snapshot = snapshot_id
        return self.start(github_token, user_email, user_name)

    def __enter__(self) -> HarvestSandbox:
        if not self.session.started:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.session.__exit__(kind, error, traceback)
        finally:
            finish(self.close)

    def close(self) -> None:
        """Closes the connections; the sandbox stays as it is."""
        if self._own:
            self._client.close()

    def send_prompt(self, prompt: str) -> Reply:
        """Sends a prompt, waits for the end of its turn and returns the agent's text."""
        return self.session.send_prompt(prompt)

    def send_prompt_stream(self, prompt: str) -> Generator[Event, None, None]:
        """Sends a prompt and yields its events."""
        with closing(self.session.send_prompt_stream(prompt)) as events:
            for event in events:
                yield event

    def exec(
        self, *argv: str, timeout_secs: float | None = None, cwd: str | None = None
    ) -> ExecResult:
        """Runs a command in the checkout and returns its whole output."""
        return self.session.exec(*argv, timeout_secs=timeout_secs, cwd=cwd)

    def snapshot(self) -> str:
        """Saves the disk; returns the id of the snapshot."""
        return self.session.snapshot()

    def terminate(self) -> None:
        """Stops the sandbox. The session keeps its disk and its history."""
        if not self.session.started:
            raise HarvestError("the sandbox is not started", "call `start()` first")
        self.session.terminate()
        self.close()
