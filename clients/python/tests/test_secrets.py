"""Secrets appear in no `repr`, traceback or dump, and reach the server."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import pprint
import traceback
from typing import Any

import pytest

from harvest_client import (
    HarvestClient,
    HarvestError,
    HarvestSandbox,
    HarvestSession,
    SandboxExecutor,
    Secret,
    ServerUnreachable,
    SessionManager,
)
from harvest_client.sync import HarvestClient as SyncClient

from .conftest import script
from .host import Host, Model, Proxy, free_port

PLANTED = "planted-1f0c9b7e"
TOKENS: dict[str, Any] = {
    name: f"{PLANTED}-{name}"
    for name in (
        "github_token",
        "claude_oauth_token",
        "anthropic_api_key",
        "openai_api_key",
        "gemini_api_key",
        "sentry_auth_token",
        "linear_api_key",
    )
}


def whole_traceback(error: BaseException) -> str:
    """A traceback with the local variables of each frame of the package and below."""
    told = traceback.TracebackException.from_exception(error, capture_locals=True)
    # The test's own frame holds the planted values.
    return "".join(line for line in told.format() if "tests/" not in line.split("\n")[0])


def test_secret_hides_its_value() -> None:
    secret = Secret(PLANTED)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret:>20}", pprint.pformat({"a": secret})]
    assert all(PLANTED not in text and "***" in text for text in shown)
    assert (secret.reveal(), Secret(secret).reveal()) == (PLANTED, PLANTED)
    assert copy.deepcopy(secret) == secret
    with pytest.raises(TypeError, match="pickled") as refused:
        pickle.dumps(secret)
    assert PLANTED not in whole_traceback(refused.value)
    with pytest.raises(TypeError):
        json.dumps(secret)


def test_objects_hide_their_secrets(environment: None) -> None:
    client = HarvestClient("http://127.0.0.1:1", PLANTED)
    session = client.create_session("a", "b", **TOKENS)
    things: list[object] = [client, session, SandboxExecutor(client), SessionManager(client)]
    things += [HarvestSandbox(HarvestSession(**TOKENS), client=client), client.connection]
    for thing in things:
        for text in (repr(thing), str(thing), pprint.pformat(vars(thing)), repr(vars(thing))):
            assert PLANTED not in text
    dump = json.dumps(dataclasses.asdict(session.options), default=str)
    assert PLANTED not in dump
    assert "***" in dump


async def test_tracebacks_hide_secrets(host: Host) -> None:
    failures: list[BaseException] = []
    proxy = Proxy(host.port)
    proxy.drop_answers = 1000
    for url, token in (
        (f"http://127.0.0.1:{free_port()}", PLANTED),
        (host.url, PLANTED),
        (host.url, host.token),
        (proxy.url, PLANTED),
    ):
        client = HarvestClient(url, token, retry_secs=0.1)
        calls = [
            client.create_session("no", "such", agent="nonsense!", **TOKENS).start(),
            HarvestSandbox("key", "no", "such", client=client).start(
                TOKENS["github_token"], "a@example.org", "A"
            ),
            SessionManager(client).create_session("no", "such", "b", TOKENS["github_token"]),
        ]
        for call in calls:
            with pytest.raises((HarvestError, ValueError)) as failed:
                await call
            failures.append(failed.value)
        await client.close()
        with SyncClient(url, token, retry_secs=0.1) as sync, pytest.raises(HarvestError) as failed:
            sync.create_session("no", "such", agent="nonsense!", **TOKENS).start()
        failures.append(failed.value)
    proxy.close()
    for failure in failures:
        assert PLANTED not in whole_traceback(failure)
        assert failure.__context__ is None or PLANTED not in whole_traceback(failure.__context__)
    assert any(isinstance(failure, ServerUnreachable) for failure in failures)


@pytest.mark.parametrize("wrong", [f"{PLANTED}\r\nx: y", f"{PLANTED}\u2603"])
async def test_malformed_tokens_are_refused_unseen(wrong: str) -> None:
    client = HarvestClient("http://127.0.0.1:1", wrong)
    with pytest.raises(ValueError, match="token has characters") as failed:
        await client.sessions()
    assert PLANTED not in whole_traceback(failed.value)


async def test_tokens_become_secrets_of_the_session(
    client: HarvestClient, host: Host, model: Model
) -> None:
    async with client.create_session("owner", "repo", model="sonnet", **TOKENS) as session:
        assert await session.send_prompt("Fix the failing tests") == Model.TEXT
        assert any(PLANTED in key for key in model.keys)
        stored = host.api("GET", "secrets")["items"]
        mine = {item["name"] for item in stored if item.get("owner") == session.id}
        assert mine == {
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_OAUTH_TOKEN",
            "GEMINI_API_KEY",
            "GITHUB_TOKEN",
            "LINEAR_API_KEY",
            "OPENAI_API_KEY",
            "SENTRY_AUTH_TOKEN",
        }
        inside = await session.exec("sh", "-c", "env; cat /proc/*/environ 2>/dev/null")
        assert PLANTED not in inside.stdout


async def test_tokens_given_again_replace_the_former(client: HarvestClient, host: Host) -> None:
    arguments: dict[str, Any] = {"agent": "scripted", "session_id": "rotated", "network": "none"}
    first = await client.create_session(**arguments, github_token="old").start()
    again = await client.create_session(**arguments, github_token="new", linear_api_key="l").start()
    assert first.id == again.id
    stored = host.api("GET", "secrets")["items"]
    names = {item["name"] for item in stored if item.get("owner") == first.id}
    assert names == {"GITHUB_TOKEN", "LINEAR_API_KEY"}
    assert await again.send_prompt(script({"text": "on"})) == "on"
    await again.delete()
