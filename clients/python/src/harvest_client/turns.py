"""Which events belong to a prompt, and when it is done. Pure."""

from __future__ import annotations

from .errors import SessionEnded, TurnFailed
from .events import (
    Event,
    PromptCancelled,
    RequestClosed,
    RequestOpened,
    StateChanged,
    TextDelta,
    TurnEnded,
    TurnStarted,
)

# Only a person continues a session that is paused for these reasons.
_HALTED = {"paused", "terminated", "stopped"}


class PromptTracker:
    """Follows one prompt through the events after it was queued."""

    def __init__(self, prompt_id: str, text: str, *, after: int) -> None:
        self.prompt_id = prompt_id
        # The number of the event with which the prompt was queued.
        self.after = after
        self.turn: str | None = None
        self.question: RequestOpened | None = None
        self.done = False
        self.failure: TurnFailed | SessionEnded | None = None
        self._prompt_text = text.strip()
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """What the agent wrote so far."""
        return "".join(self._said)

    def take(self, event: Event) -> bool:
        """Whether the event belongs to the prompt; sets `done` at its end."""
        if isinstance(event, TurnStarted) and event.prompt == self.prompt_id:
            self.turn = event.turn
        if isinstance(event, RequestClosed) and self.turn is None and self._answers(event):
            # An answer starts no turn: the one that asked goes on.
            self.turn = event.turn
        if event.turn is not None and event.turn != self.turn:
            return False
        if isinstance(event, TextDelta):
            self._said.append(event.text)
        elif isinstance(event, RequestOpened):
            self.question, self.done = event, True
        elif isinstance(event, TurnEnded):
            self.done = True
            if event.outcome != "completed":
                self.failure = self._turn_failed(event)
        elif isinstance(event, PromptCancelled):
            if event.prompt == self.prompt_id:
                self._end("the prompt was removed from the queue", "queued", "cancelled")
        elif isinstance(event, StateChanged):
            self._state(event)
        return True

    def _answers(self, event: RequestClosed) -> bool:
        return event.answer is not None and event.answer.strip() == self._prompt_text

    def _turn_failed(self, event: TurnEnded) -> TurnFailed:
        why = event.error or event.reason or ""
        return TurnFailed(
            f"the turn {event.outcome}: {why}" if why else f"the turn {event.outcome}",
            outcome=event.outcome,
            reason=event.reason,
            text=self.text,
        )

    def _state(self, event: StateChanged) -> None:
        halted = event.state == "paused" and event.reason in _HALTED
        # While a turn runs, its own end is still to come.
        if self.turn is None and (event.state in {"failed", "archived"} or halted):
            why = event.detail or event.reason
            self._end(f"the session is {event.state}: {why}", event.state, event.reason)

    def _end(self, message: str, state: str, reason: str) -> None:
        self.done = True
        self.failure = SessionEnded(message, state=state, reason=reason)
