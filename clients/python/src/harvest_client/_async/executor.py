"""`SandboxExecutor`: runs code in a fresh sandbox that is removed afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from ..errors import ApiError
from ..options import timeout_millis
from ..results import LANGUAGES, ExecutionResult, Output
from ..secret import Secret
from .client import HarvestClient


class SandboxExecutor:
    """Executes code, each time in a sandbox of its own without network."""

    def __init__(
        self,
        client: HarvestClient | None = None,
        *,
        url: str | None = None,
        token: str | Secret | None = None,
    ) -> None:
        self._own = client is None
        self._client = client or HarvestClient(url, token)

    def __repr__(self) -> str:
        return f"SandboxExecutor({self._client!r})"

    async def execute(
        self,
        code: str,
        timeout_secs: float = 1800,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        lang: str = "python",
    ) -> ExecutionResult:
        """Runs the code and returns its whole output.

        There is a result for whatever happens to the code, a refusal by the server included
        (`status="failed"`, `returncode=125`). Only an unreachable server raises.
        """
        if lang not in LANGUAGES:
            raise ValueError(f"lang is one of {', '.join(LANGUAGES)}, not {lang!r}")
        body: dict[str, Any] = {"code": code, "lang": lang, "env": dict(env or {})}
        body["timeout_millis"] = timeout_millis(timeout_secs)
        if cwd is not None:
            body["cwd"] = cwd
        output = Output()
        lines = self._client.connection.lines("POST", "/v1/exec", body=body)
        try:
            async with aclosing(lines):
                async for line in lines:
                    output.take(line)
        except ApiError as error:
            output.say(str(error))
        finally:
            if self._own:
                await self._client.close()
        return output.execution_result()
