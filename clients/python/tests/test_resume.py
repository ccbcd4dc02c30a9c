"""Streams over broken connections and killed servers; requests that are sent again, or not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from harvest_client import ConnectionLost, HarvestClient, ServerUnreachable, TextDelta
from harvest_client.events import TurnEnded
from harvest_client.sync import HarvestClient as SyncClient

from .conftest import script
from .host import Host, Proxy, free_port

SAID = "tick " * 2000
TICKS = script({"text": SAID, "chunks": 40, "delay_ms": 25})


@pytest.fixture
def proxy(host: Host) -> Iterator[Proxy]:
    """A proxy in front of the shared server."""
    made = Proxy(host.port)
    yield made
    made.close()


@pytest.fixture
def own_host() -> Iterator[Host]:
    """A server that a test may kill."""
    made = Host()
    made.start()
    yield made
    made.close()


async def test_cut_stream_has_no_gap_and_no_repeat(host: Host, proxy: Proxy) -> None:
    async with HarvestClient(proxy.url, host.token) as client:
        session = await client.create_session(agent="scripted", network="none").start()
        await session.wait_until_running()
        proxy.cut_after = 4000
        before = proxy.connections
        events = [event async for event in session.send_prompt_stream(TICKS)]
        proxy.cut_after = None
        assert proxy.connections - before > 2
        said = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert said == SAID
        seqs = [event.seq for event in events]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        assert isinstance(events[-1], TurnEnded)
        await session.delete()


async def test_stream_goes_on_after_kill_of_the_server(own_host: Host) -> None:
    async with HarvestClient(own_host.url, own_host.token) as client:
        session = await client.create_session(agent="scripted", network="none").start()
        await session.wait_until_running()
        events = []
        restart: asyncio.Future[None] | None = None
        async for event in session.send_prompt_stream(TICKS):
            events.append(event)
            if isinstance(event, TextDelta) and restart is None:
                own_host.kill()
                restart = asyncio.ensure_future(asyncio.to_thread(own_host.start))
        assert restart is not None
        await restart
        said = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert said == SAID
        seqs = [event.seq for event in events]
        assert len(set(seqs)) == len(seqs)
        stored = [event.seq async for event in session.events()]
        assert stored == list(range(1, len(stored) + 1))
        assert [seq for seq in stored if seqs[0] <= seq <= seqs[-1]] == seqs


def test_blocking_stream_goes_on_after_kill(own_host: Host) -> None:
    with SyncClient(own_host.url, own_host.token) as client:
        session = client.create_session(agent="scripted", network="none").start()
        said, restart = [], None
        for event in session.send_prompt_stream(TICKS):
            if isinstance(event, TextDelta):
                said.append(event.text)
                if restart is None:
                    own_host.kill()
                    restart = threading.Thread(target=own_host.start)
                    restart.start()
        assert "".join(said) == SAID
        assert restart is not None
        restart.join()


async def test_prompt_with_lost_answer_runs_once(host: Host, proxy: Proxy) -> None:
    async with HarvestClient(proxy.url, host.token) as client:
        session = await client.create_session(agent="scripted", network="none").start()
        await session.wait_until_running()
        proxy.drop_answers = 1
        await session.queue_prompt(script({"text": "once"}))
        sent = [request for request in proxy.requests if b"/prompts" in request]
        assert len(sent) == 2
        keys = {
            line for request in sent for line in request.split(b"\r\n") if b"idempotency" in line
        }
        assert len(keys) == 1
        assert await session.send_prompt(script({"text": "two"})) == "two"
        assert len(await session.turns()) == 2
        await session.delete()


async def test_session_with_lost_answer_is_created_once(host: Host, proxy: Proxy) -> None:
    before = {session["id"] for session in host.api("GET", "sessions?limit=200")["items"]}
    async with HarvestClient(proxy.url, host.token) as client:
        proxy.drop_answers = 1
        session = await client.create_session(agent="scripted", network="none").start()
        after = {session["id"] for session in host.api("GET", "sessions?limit=200")["items"]}
        assert after - before == {session.id}
        await session.delete()


async def test_command_with_lost_answer_is_not_repeated(host: Host, proxy: Proxy) -> None:
    async with HarvestClient(proxy.url, host.token) as client:
        session = await client.create_session(agent="scripted", network="none").start()
        await session.wait_until_running()
        proxy.drop_answers = 1
        with pytest.raises(ConnectionLost, match="broke"):
            await session.exec("sh", "-c", "echo x >> /tmp/ran")
        assert sum(b"/exec" in request for request in proxy.requests) == 1
        # The server ends a command whose client is gone.
        assert (await session.exec("sh", "-c", "cat /tmp/ran")).stdout in {"", "x\n"}
        await session.delete()


async def test_missing_server_is_reported_soon() -> None:
    client = HarvestClient(f"http://127.0.0.1:{free_port()}", "token")
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match="harvest up") as failed:
        await client.sessions()
    assert time.monotonic() - began < 30
    assert isinstance(failed.value, ConnectionError)
