"""What a session is created from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from .secret import Secret

# The names under which the gateway looks for each token.
SECRET_NAMES = {
    "github_token": "GITHUB_TOKEN",
    "claude_oauth_token": "CLAUDE_CODE_OAUTH_TOKEN",
    "anthropic_api_key": "ANTHROPIC_API_KEY",
    "openai_api_key": "OPENAI_API_KEY",
    "gemini_api_key": "GEMINI_API_KEY",
    "sentry_auth_token": "SENTRY_AUTH_TOKEN",
    "linear_api_key": "LINEAR_API_KEY",
}


@dataclass
class SessionOptions:
    """The arguments of a new session."""

    session_id: str | None = None
    repo_owner: str | None = None
    repo_name: str | None = None
    branch: str | None = None
    agent: str | None = None
    model: str | None = None
    user_name: str | None = None
    user_email: str | None = None
    snapshot: str | None = None
    network: str | None = None
    pr_mode: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    budget_micros: int | None = None
    secrets: dict[str, Secret] = field(default_factory=dict)

    @property
    def repository(self) -> str | None:
        """`OWNER/NAME`, or `None` for a session without a repository."""
        if bool(self.repo_owner) != bool(self.repo_name):
            raise ValueError("repo_owner and repo_name belong together")
        return f"{self.repo_owner}/{self.repo_name}" if self.repo_owner else None

    @property
    def author(self) -> dict[str, str] | None:
        """The author of the commits; `None` for the user of the token."""
        if bool(self.user_name) != bool(self.user_email):
            raise ValueError("user_name and user_email belong together")
        if not self.user_name or not self.user_email:
            return None
        return {"name": self.user_name, "email": self.user_email}

    def body(self, *, by_url: bool = False) -> dict[str, Any]:
        """The body of the request; `by_url` names a repository that is not registered yet."""
        repository = self.repository
        if repository and by_url:
            repository = github_url(repository)
        given = {
            "repository": repository,
            "base": self.branch,
            "agent": self.agent,
            "model": self.model,
            "author": self.author,
            "from": self.snapshot,
            "network": self.network,
            "pr_mode": self.pr_mode,
            "env": self.env,
            "budget_micros": self.budget_micros,
            "secrets": self.secrets,
            "key": self.session_id,
        }
        return {name: value for name, value in given.items() if value not in (None, {})}

    def add_secrets(self, tokens: Mapping[str, str | Secret | None]) -> None:
        """Adds the tokens that have a value, by argument name."""
        for argument, value in tokens.items():
            if value:
                self.secrets[SECRET_NAMES[argument]] = Secret(value)


def github_url(repository: str) -> str:
    """The address of a repository that was never registered."""
    return f"https://github.com/{repository}.git"


def micros(dollars: float | str | Decimal | None) -> int | None:
    """US dollars as millionths."""
    if dollars is None:
        return None
    try:
        amount = Decimal(str(dollars)) * 1_000_000
    except InvalidOperation:
        raise ValueError(f"budget is an amount in US dollars, not {dollars!r}") from None
    if not amount.is_finite() or amount < 0 or amount != amount.to_integral_value():
        raise ValueError(f"budget is an amount in US dollars, not {dollars!r}")
    return int(amount)


def timeout_millis(timeout_secs: float | None) -> int | None:
    """Seconds as the API's milliseconds."""
    if timeout_secs is None:
        return None
    if not 0 < timeout_secs < 10**9:
        raise ValueError(f"timeout_secs is a positive number of seconds, not {timeout_secs!r}")
    return max(1, round(timeout_secs * 1000))
