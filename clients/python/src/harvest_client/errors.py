"""Errors, typed by the `code` of the server's problem documents (RFC 9457)."""

from __future__ import annotations

import json


class HarvestError(Exception):
    """Base of all errors of this package. `hint` says what to do next, if anything helps."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ServerUnreachable(HarvestError, ConnectionError):
    """No answer from the server."""


class ConnectionLost(ServerUnreachable):
    """The connection broke after the request was sent: it may or may not have had its effect."""


class ProtocolError(HarvestError):
    """An answer that this version does not understand."""


class NotStarted(HarvestError):
    """The session was not created on the server yet."""


class ApiError(HarvestError):
    """A refusal by the server. `code` is stable; the message is for people."""

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        code: str = "unknown",
        status: int = 0,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.code = code
        self.status = status
        self.request_id = request_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}(code={self.code!r}, status={self.status}, {self.message!r})"


class Unauthorized(ApiError):
    """The token is missing or not valid."""


class Forbidden(ApiError):
    """The token's user may not do this."""


class NotFound(ApiError, LookupError):
    """What the request names does not exist."""


class Conflict(ApiError):
    """The state of the resource does not allow the request."""


class KeyTaken(Conflict):
    """Another session already has this `session_id`."""


class Exists(Conflict):
    """The name is already in use."""


class RequestInProgress(Conflict):
    """The first request with this idempotency key has not ended yet."""


class InvalidRequest(ApiError, ValueError):
    """The request is wrong: the same request will fail again."""


class RemoteUnavailable(InvalidRequest):
    """The git remote does not exist, cannot be reached or needs a token."""


class CursorGone(ApiError):
    """Events after this number do not exist."""


class LimitReached(ApiError):
    """Too many requests, or no free slot for a sandbox."""


class NoSpace(ApiError):
    """The server's disk is full."""


class Unavailable(ApiError):
    """The server is starting or stopping; later requests may succeed."""


class TurnFailed(HarvestError):
    """A turn that did not complete. `text` is what the agent wrote until then."""

    def __init__(
        self, message: str, *, outcome: str, reason: str | None, text: str, hint: str | None = None
    ) -> None:
        super().__init__(message, hint)
        self.outcome = outcome
        self.reason = reason
        self.text = text


class SessionEnded(HarvestError):
    """The session failed or was stopped before the prompt was done."""

    def __init__(self, message: str, *, state: str, reason: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.state = state
        self.reason = reason


_BY_CODE: dict[str, type[ApiError]] = {
    "key_taken": KeyTaken,
    "exists": Exists,
    "in_progress": RequestInProgress,
    "remote_unavailable": RemoteUnavailable,
    "cursor_gone": CursorGone,
    "no_room": NoSpace,
    "rate_limited": LimitReached,
    "limit_sandboxes": LimitReached,
    "limit_user": LimitReached,
    "stopping": Unavailable,
    "database_busy": Unavailable,
    "sandbox_unreachable": Unavailable,
}

_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: CursorGone,
    413: InvalidRequest,
    415: InvalidRequest,
    422: InvalidRequest,
    429: LimitReached,
    503: Unavailable,
    507: NoSpace,
}


def api_error(status: int, body: bytes) -> ApiError:
    """The error for a problem document, or for any other body of an error response."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    fields = problem if isinstance(problem, dict) else {}

    def text(name: str) -> str | None:
        value = fields.get(name)
        return value if isinstance(value, str) and value else None

    code = text("code") or f"http_{status}"
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, ApiError)
    message = text("detail") or text("title") or f"the server answered with status {status}"
    return kind(message, text("hint"), code=code, status=status, request_id=text("request_id"))
