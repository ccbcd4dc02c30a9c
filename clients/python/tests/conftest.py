"""Fixtures: one server for all tests, and one of its own for tests that kill it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from harvest_client import HarvestClient, HarvestSession
from harvest_client._async.connection import Connection

from .host import Host, Model

REPOSITORIES = (
    "owner/repo",
    "me/app",
    "your-org/your-repo",
    "RelevanceAI/relevance-api-node",
    "RelevanceAI/relevance-chat-app",
)


def script(*steps: object, say: str = "Work.") -> str:
    """A prompt that the scripted agent carries out."""
    return f"{say}\nscript: {json.dumps(steps)}"


@pytest.fixture(scope="session")
def model() -> Iterator[Model]:
    """A stand-in for the model service."""
    server = Model()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def host(model: Model) -> Iterator[Host]:
    """A server with repositories, of which all are copies of one."""
    server = Host(HARVEST_UPSTREAMS_ANTHROPIC_URL=model.url, ANTHROPIC_API_KEY="sk-of-the-server")
    server.start()
    server.add_repository(*REPOSITORIES)
    yield server
    server.close()


@pytest.fixture
def environment(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a user of that server."""
    monkeypatch.setenv("HARVEST_URL", host.url)
    monkeypatch.setenv("HARVEST_TOKEN", host.token)


@pytest_asyncio.fixture
async def closed_afterwards(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Closes the connections of programs that close none."""
    made: list[Connection] = []
    construct = Connection.__init__

    def record(self: Connection, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(Connection, "__init__", record)
    yield
    for connection in made:
        await connection.close()


@pytest_asyncio.fixture
async def client(host: Host) -> AsyncIterator[HarvestClient]:
    """A client of that server."""
    async with HarvestClient(host.url, host.token) as made:
        yield made


@pytest_asyncio.fixture
async def session(client: HarvestClient) -> AsyncIterator[HarvestSession]:
    """A session of the scripted agent."""
    made = client.create_session("owner", "repo", agent="scripted", network="none")
    async with made:
        yield made
    await made.delete()
