# Generated from _async/client.py by scripts/make_sync.py: do not edit.
"""The client: sessions and repositories of one server."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import closing, suppress
from decimal import Decimal
from types import TracebackType
from typing import Any

from ..decode import decode
from ..errors import ApiError, Exists, NotFound
from ..models import Build, Repository, ScheduleRun, Session
from ..options import github_url
from ..progress import Progress, build_line, reporter
from ..results import BuildResult
from ..secret import Secret
from .connection import Connection
from .session import HarvestSession


class HarvestClient:
    """A client of a Harvest server.

    The server is `url`, else `HARVEST_URL`, else the one that runs on this machine; the token is
    `token`, else `HARVEST_TOKEN`, else that of the local server. `modal_token_id` and
    `modal_token_secret` are accepted and ignored: the server runs the sandboxes.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | Secret | None = None,
        *,
        retry_secs: float = 60.0,
        modal_token_id: str | Secret | None = None,
        modal_token_secret: str | Secret | None = None,
    ) -> None:
        if modal_token_id is not None or modal_token_secret is not None:
            warnings.warn(
                "modal_token_id and modal_token_secret are ignored: the server runs the sandboxes",
                stacklevel=2,
            )
        self.connection = Connection(url, token, retry_secs=retry_secs)

    def __repr__(self) -> str:
        return f"HarvestClient({self.connection!r})"

    def __enter__(self) -> HarvestClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; a later request opens new ones."""
        self.connection.close()

    # Sessions

    def create_session(
        self,
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
        session_id: str | None = None,
        snapshot: str | None = None,
        network: str | None = None,
        pr: str | None = None,
        env: Mapping[str, str] | None = None,
        budget: float | str | Decimal | None = None,
    ) -> HarvestSession:
        """A session, created on the server when its context is entered or by its `start()`.

        A repository that is not registered is taken from github.com. `branch` is where the work
        starts, `budget` what its model calls may cost in US dollars, `pr` the pull request that the
        session is to have: `none`, `draft` or `ready`. Tokens become secrets of the session at the
        gateway; they never enter the sandbox, unlike `env`.
        """
        return HarvestSession(
            session_id,
            repo_owner,
            repo_name,
            branch,
            agent=agent,
            model=model,
            user_name=user_name,
            user_email=user_email,
            github_token=github_token,
            claude_oauth_token=claude_oauth_token,
            anthropic_api_key=anthropic_api_key,
            openai_api_key=openai_api_key,
            gemini_api_key=gemini_api_key,
            sentry_auth_token=sentry_auth_token,
            linear_api_key=linear_api_key,
            snapshot=snapshot,
            network=network,
            pr=pr,
            env=env,
            budget=budget,
            client=self,
        )

    def session(self, session_id: str) -> HarvestSession:
        """An existing session, by the caller's id or the server's."""
        return HarvestSession.existing(self.connection, session_id)

    def sessions(
        self, *, repository: str | None = None, state: str | None = None, archived: bool = False
    ) -> list[HarvestSession]:
        """The sessions, newest first."""
        query = {"repository": repository, "state": state, "archived": archived or None}
        with closing(self.connection.pages("/v1/sessions", query)) as items:
            found = [decode(Session, item) for item in items]
        return [HarvestSession.existing(self.connection, info) for info in found]

    # Repositories

    def register_repository(
        self,
        repo_owner: str,
        repo_name: str,
        default_branch: str | None = None,
        *,
        url: str | None = None,
        secret: str | None = None,
    ) -> Repository:
        """Registers a repository, from github.com unless `url` says otherwise.

        A registered one stays, with `default_branch` as its base. `secret` is the name of the
        server's secret that opens it.
        """
        name = f"{repo_owner}/{repo_name}"
        known: Repository | None = None
        with suppress(NotFound):
            known = self.repository(repo_owner, repo_name)
        if known is None:
            given = {"name": name, "url": url or github_url(name), "base": default_branch}
            body = {key: value for key, value in {**given, "secret": secret}.items() if value}
            try:
                return decode(Repository, self.connection.create("/v1/repositories", body=body))
            except Exists:
                known = self.repository(repo_owner, repo_name)
        if default_branch is not None and known.base != default_branch:
            answer = self.connection.json(
                "PATCH", f"/v1/repositories/{name}", body={"base": default_branch}
            )
            return decode(Repository, answer)
        return known

    def repository(self, repo_owner: str, repo_name: str) -> Repository:
        """A registered repository."""
        path = f"/v1/repositories/{repo_owner}/{repo_name}"
        return decode(Repository, self.connection.json("GET", path))

    def build_repository(
        self,
        repo_owner: str,
        repo_name: str,
        branch: str | None = None,
        *,
        progress: Progress = None,
    ) -> BuildResult:
        """Builds the state that sessions start from; registers the repository first if needed.

        A build that fails is a result with `success: False`. Progress goes to stderr when it is a
        terminal, or to the given function.
        """
        report = reporter(progress)
        name, began = f"{repo_owner}/{repo_name}", time.monotonic()
        result = BuildResult(
            success=False,
            status="failed",
            snapshot_id=None,
            repo=name,
            branch=branch,
            package_manager=None,
            commit=None,
            duration_secs=0.0,
        )
        failure: ApiError | None = None
        try:
            known = self.register_repository(repo_owner, repo_name)
            result["branch"] = branch or known.base
            # Without a base of its own the repository's builds are of the remote's default branch.
            is_base = branch is None or known.base is None or branch == known.base
            self._build(name, None if is_base else branch, result, report)
        except ApiError as error:
            failure = error
        if failure is not None:
            result["error"], result["hint"] = failure.message, failure.hint
        result["duration_secs"] = round(time.monotonic() - began, 3)
        return result

    def _build(self, name: str, branch: str | None, result: BuildResult, report: Any) -> None:
        path = f"/v1/repositories/{name}/build"
        lines = self.connection.lines("POST", path, body={"branch": branch})
        with closing(lines):
            for line in lines:
                text = build_line(line)
                if text:
                    report(text)
                if line.get("type") == "built":
                    built = decode(Build, line.get("build"))
                    result["success"], result["status"] = True, "success"
                    result["snapshot_id"], result["commit"] = built.snapshot_id, built.commit
                    result["package_manager"] = built.package_manager
                elif line.get("type") == "failed":
                    result["error"] = str(line.get("message", ""))
        known = self.connection.json("GET", f"/v1/repositories/{name}")
        result["branch"] = result["branch"] or known.get("base")

    def refresh_images(self) -> ScheduleRun:
        """Looks at all repositories now and rebuilds those that moved."""
        return decode(ScheduleRun, self.connection.json("POST", "/v1/schedule/run"))
