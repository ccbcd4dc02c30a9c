# Generated from _async/session.py by scripts/make_sync.py: do not edit.
"""A session: a conversation with an agent in its own sandbox."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from ..decode import decode
from ..errors import HarvestError, NotFound
from ..events import Event, Layout, parse_event
from ..models import Prompt, PullRequest, Session, SessionRepository, Snapshot, Turn
from ..options import timeout_millis
from ..results import ExecResult, Output, Reply
from ..turns import PromptTracker
from .session_life import SessionLife
from .stream import follow


class HarvestSession(SessionLife):
    """A session. It is created on the server by `start()`, or by entering its context.

    Leaving the context pauses it: its disk and conversation are saved, and the next prompt
    continues. With a `session_id` of the caller, creating it again gives the same session.
    """

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
        with closing(follow(self._connect(), self._path(), tracker.after)) as events:
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
        with closing(follow(self._connect(), self._path(), after)) as events:
            for event in events:
                yield event

    def turns(self) -> list[Turn]:
        """All turns, oldest first."""
        page = self._connect().json("GET", self._path("/turns"))
        return [decode(Turn, item) for item in page.get("items", [])]

    # Its sandbox

    def set_author(self) -> None:
        """Makes the session's user the author of commits that are made before the first prompt."""
        author = self.options.author
        if author is not None:
            for name, value in (
                ("name", f"{author['name']} (Harvest)"),
                ("email", author["email"]),
            ):
                self.exec("git", "config", "--global", f"user.{name}", value)

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

    def snapshot(self, name: str | None = None) -> str:
        """Saves the disk while the session goes on; returns the id of the snapshot.

        A snapshot with a name stays until the session is deleted; others are subject to the
        server's retention rules.
        """
        body = {} if name is None else {"name": name}
        taken = self._connect().create(self._path("/snapshots"), body=body)
        return decode(Snapshot, taken).id

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

    def create_pull_request(
        self, title: str | None = None, body: str | None = None, *, draft: bool | None = None
    ) -> PullRequest:
        """Pushes the committed work and opens the pull request, or updates the one there is.

        Harvest runs the repository's check on the pushed commit after the next turn.
        """
        pushed = self.exec("git", "push", "origin", "HEAD")
        if pushed.returncode != 0:
            raise HarvestError(f"the push failed: {pushed.stderr.strip()}")
        given = {"title": title, "body": body, "draft": draft}
        wanted = {name: value for name, value in given.items() if value is not None}
        page = self._connect().json("POST", self._path("/pr"), body=wanted)
        opened = [decode(SessionRepository, item).pr for item in page.get("items", [])]
        for pull_request in opened:
            if pull_request is not None:
                return pull_request
        raise HarvestError("the pull request was not opened")
