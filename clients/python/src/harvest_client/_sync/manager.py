# Generated from _async/manager.py by scripts/make_sync.py: do not edit.
"""`SessionManager`: sessions by the caller's ids, with a state that is updated in place."""

from __future__ import annotations

import uuid

from ..models import Session
from ..results import Reply, SessionState
from ..secret import Secret
from .client import HarvestClient
from .session import HarvestSession


class SessionManager:
    """Creates, prompts, pauses, restores and terminates sessions."""

    def __init__(self, client: HarvestClient | None = None) -> None:
        self.client = client or HarvestClient()
        self.sessions: dict[str, SessionState] = {}

    def __repr__(self) -> str:
        return f"SessionManager({len(self.sessions)} sessions)"

    def create_session(
        self,
        repo_owner: str,
        repo_name: str,
        branch: str | None = None,
        github_token: str | Secret | None = None,
        user_email: str | None = None,
        user_name: str | None = None,
        *,
        session_id: str | None = None,
    ) -> SessionState:
        """Creates a session and waits until its sandbox is ready."""
        github_token = Secret(github_token) if github_token else None
        session = self.client.create_session(
            repo_owner,
            repo_name,
            branch,
            github_token=github_token,
            user_email=user_email,
            user_name=user_name,
            session_id=session_id or str(uuid.uuid4()),
        )
        session.start()
        session.wait_until_running()
        session.set_author()
        return self._update(session)

    def send_prompt(self, session_id: str, prompt: str) -> Reply:
        """Sends a prompt, which waits while another one runs; returns the agent's text."""
        session = self._session(session_id)
        reply = session.send_prompt(prompt)
        self._update(session)
        return reply

    def pause_session(self, session_id: str) -> str:
        """Saves the session and stops its sandbox; returns the id of the snapshot."""
        session = self._session(session_id)
        snapshot_id = session.pause()
        self._update(session)
        return snapshot_id

    def restore_session(self, session_id: str) -> SessionState:
        """Resumes a paused session and waits until its sandbox is ready."""
        session = self._session(session_id)
        session.restore()
        return self._update(session)

    def terminate_session(self, session_id: str) -> None:
        """Stops the sandbox. The server keeps the disk and the history."""
        session = self._session(session_id)
        session.terminate()
        self._update(session)

    def _session(self, session_id: str) -> HarvestSession:
        return self.client.session(session_id)

    def _update(self, session: HarvestSession) -> SessionState:
        info: Session = session.info
        state = SessionState(
            session_id=info.key or info.id,
            repo_owner=info.repo_owner or "",
            repo_name=info.repo_name or "",
            branch=info.branch,
            status=info.status,
            created_at=info.created_at,
            last_activity=info.last_activity,
            snapshot_id=info.snapshot_id,
            pr_number=info.pr_number,
            pr_url=info.pr_url,
        )
        known = self.sessions.setdefault(state.session_id, state)
        # Callers hold the first object: it shows what happened since.
        vars(known).update(vars(state))
        return known
