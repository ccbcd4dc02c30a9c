"""Sessions on a real server with the scripted agent."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from harvest_client import (
    HarvestClient,
    HarvestError,
    HarvestSession,
    KeyTaken,
    NotFound,
    NotStarted,
    SessionEnded,
    TextDelta,
    TurnFailed,
)
from harvest_client.events import (
    PromptQueued,
    PrOpened,
    RequestOpened,
    ToolEnded,
    TurnEnded,
    TurnStarted,
)

from .conftest import script
from .host import Host


async def test_chunks_print_as_text_and_are_events(session: HarvestSession) -> None:
    steps = [{"text": "Counting.", "chunks": 3}, {"bash": "false"}, {"text": "Done.\n"}]
    chunks = [chunk async for chunk in session.send_prompt_stream(script(*steps))]
    printed = "".join(str(chunk) for chunk in chunks)
    assert printed.endswith("Counting.\n● Bash false\n  failed: (exit code 1)\nDone.\n"), printed
    said = "".join(chunk.text for chunk in chunks if isinstance(chunk, TextDelta))
    assert said == "Counting.Done.\n"
    assert [chunk.ok for chunk in chunks if isinstance(chunk, ToolEnded)] == [False]
    started = next(chunk for chunk in chunks if isinstance(chunk, TurnStarted))
    ended = chunks[-1]
    assert isinstance(ended, TurnEnded)
    assert (ended.outcome, ended.turn) == ("completed", started.turn)
    assert session.status == "running"


async def test_send_prompt_returns_the_text(session: HarvestSession) -> None:
    reply = await session.send_prompt(script({"text": "One. "}, {"text": "Two."}))
    assert reply == "One. Two."
    assert reply.question is None
    (turn,) = await session.turns()
    assert (turn.id, turn.outcome) == (reply.turn_id, "completed")


async def test_streams_hold_only_their_own_turn(session: HarvestSession) -> None:
    prompts = [script({"text": f"answer {number}"}) for number in range(4)]
    replies = await asyncio.gather(*(session.send_prompt(prompt) for prompt in prompts))
    assert list(replies) == [f"answer {number}" for number in range(4)]


async def test_question_ends_stream_and_prompt_answers(session: HarvestSession) -> None:
    ask = {"ask": {"question": "Which?", "options": ["a", "b"]}}
    reply = await session.send_prompt(script(ask, {"text": " Good."}))
    assert isinstance(reply.question, RequestOpened)
    assert str(reply.question) == "? Which? (a / b)\n"
    assert session.status == "running"
    answer = await session.send_prompt("b")
    assert answer == "The answer is b. Good."
    assert answer.turn_id == reply.turn_id


async def test_failed_turn_raises_with_its_text(session: HarvestSession) -> None:
    with pytest.raises(TurnFailed) as failed:
        await session.send_prompt(script({"text": "So far."}, {"error": {"status": 400}}))
    assert (failed.value.outcome, failed.value.text) == ("failed", "So far.")


async def test_stopped_turn_raises(session: HarvestSession) -> None:
    with pytest.raises(TurnFailed) as stopped:
        async for chunk in session.send_prompt_stream(script({"text": "On."}, {"hang": 600})):
            if isinstance(chunk, TextDelta):
                await session.stop()
    assert stopped.value.outcome == "stopped"


async def test_cancelled_prompt_raises(session: HarvestSession, host: Host) -> None:
    waiting = asyncio.ensure_future(session.send_prompt(script({"hang": 600})))
    async for event in session.events(follow_new=True):
        if isinstance(event, TurnStarted):
            break
    queued = asyncio.ensure_future(session.send_prompt("later"))
    async for later in session.events(event.seq, follow_new=True):
        if isinstance(later, PromptQueued):
            prompt = later.prompt
            break
    host.api("DELETE", f"sessions/{session.id}/prompts/{prompt}")
    with pytest.raises(SessionEnded, match="removed from the queue"):
        await queued
    await session.stop()
    with pytest.raises(TurnFailed):
        await waiting


async def test_exec_files_and_diff(session: HarvestSession) -> None:
    await session.files.make_folder("notes")
    await session.files.write("notes/a.txt", "hello ☃\n", mode=0o600)
    assert await session.files.read_text("notes/a.txt") == "hello ☃\n"
    (entry,) = await session.files.list("notes")
    assert (entry.name, entry.mode & 0o777, entry.kind) == ("a.txt", 0o600, "file")
    result = await session.exec("sh", "-c", "cat notes/a.txt; echo bad >&2; exit 3")
    assert (result.returncode, result.stdout, result.stderr) == (3, "hello ☃\n", "bad\n")
    assert "hello" in result
    assert "bad" not in result
    env = await session.exec("sh", "-c", "echo $A; pwd", env={"A": "b"}, cwd="/tmp")
    assert env.stdout == "b\n/tmp\n"
    late = await session.exec("sleep", "60", timeout_secs=0.2)
    assert (late.returncode, late.status) == (124, "timeout")
    missing = await session.exec("no-such-program")
    assert (missing.returncode, missing.status) == (125, "failed")
    await session.send_prompt(script({"write": {"path": "b.txt", "content": "b\n"}}))
    assert "+++ b/b.txt" in await session.diff()
    await session.files.delete("notes", recursive=True)
    with pytest.raises(NotFound):
        await session.files.read("notes/a.txt")


async def test_pause_and_restore_keep_the_work(session: HarvestSession) -> None:
    await session.send_prompt(script({"write": {"path": "a.txt", "content": "one"}}))
    await session.send_prompt(script({"write": {"path": "a.txt", "content": "two"}}))
    assert (await session.pause()).startswith("snp_")
    assert session.status == "paused"
    await session.restore()
    assert session.status == "running"
    assert "two" in await session.exec("cat", "a.txt")
    await session.restore(turn=1)
    assert "one" in await session.exec("cat", "a.txt")


async def test_forks_continue_separately(session: HarvestSession) -> None:
    await session.send_prompt(script({"write": {"path": "a.txt", "content": "base"}}))
    await session.send_prompt(script({"write": {"path": "a.txt", "content": "base"}}))
    prompts = [script({"text": "left"}), script({"bash": "cat a.txt"}, {"text": "right"})]
    forks = await session.fork(prompts=prompts)
    assert len(forks) == 2
    for fork in forks:
        assert "base" in await fork.exec("cat", "a.txt")
        assert fork.info.forked_from == session.id
        await fork.delete()


async def test_snapshot_starts_another_session(
    session: HarvestSession, client: HarvestClient
) -> None:
    await session.exec("touch", "kept")
    snapshot = await session.snapshot()
    assert (await session.refresh()).status == "running"
    await session.exec("rm", "kept")
    other = client.create_session("owner", "repo", agent="scripted", snapshot=snapshot)
    async with other:
        assert "kept" in await other.exec("ls")
    await other.delete()


@pytest_asyncio.fixture
async def member(host: Host) -> AsyncIterator[HarvestClient]:
    """A client of a member."""
    name = f"member-{uuid.uuid4()}"
    user = {"name": name, "email": f"{name}@example.org"}
    made = host.api("POST", "tokens", {"name": name, "user": user})
    async with HarvestClient(host.url, made["value"]) as client:
        yield client


async def test_member_takes_and_restores_snapshots(member: HarvestClient) -> None:
    async with member.create_session(agent="scripted", network="none") as session:
        await session.send_prompt(script({"write": {"path": "a", "content": "one"}}))
        kept = await session.snapshot("before")
        await session.send_prompt(script({"write": {"path": "a", "content": "two"}}))
        assert await session.snapshot() != kept
        named = [one for one in await session.snapshots() if one.name == "before"]
        assert [(one.id, one.kind, one.pinned) for one in named] == [(kept, "request", True)]
        await session.restore(snapshot=kept)
        assert "one" in await session.exec("cat", "a")
        other = member.create_session(agent="scripted", snapshot=kept)
        async with other:
            assert "one" in await other.exec("cat", "a")
        await other.delete()
    await session.delete()


async def test_key_belongs_to_its_user(member: HarvestClient, client: HarvestClient) -> None:
    arguments: dict[str, Any] = {"agent": "scripted", "network": "none"}
    key = f"ticket #12/{uuid.uuid4()}"
    theirs = await member.create_session(session_id=key, **arguments).start()
    with pytest.raises(NotFound):
        await client.session(key).refresh()
    own = await client.create_session(session_id=key, **arguments).start()
    assert own.id != theirs.id
    again = member.session(key)
    assert await again.send_prompt(script({"text": "hi"})) == "hi"
    assert again.id == theirs.id
    for session in (own, theirs):
        await session.delete()


async def test_pr_mode_opens_pull_request_by_itself(client: HarvestClient) -> None:
    async with client.create_session("owner", "repo", agent="scripted", pr="draft") as session:
        await session.send_prompt(script({"write": {"path": "left", "content": "x"}}))
        opened = None
        async for event in session.events(follow_new=True):
            if isinstance(event, PrOpened):
                opened = await session.pull_request()
                break
        assert opened is not None
        assert opened.state == "open"


async def test_pull_request_is_opened_and_updated(client: HarvestClient) -> None:
    who: dict[str, Any] = {"user_name": "Ada L", "user_email": "ada@example.org"}
    async with client.create_session("owner", "repo", agent="scripted", **who) as session:
        assert await session.pull_request() is None
        commit = "echo x > x; git add x; git commit -qm x; git log -1 --format='%an <%ae>'"
        await session.send_prompt(script({"bash": commit}))
        author = await session.exec("git", "log", "-1", "--format=%an <%ae>")
        assert author.stdout == "Ada L (Harvest) <ada@example.org>\n"
        opened = await session.create_pull_request(title="Add x", body="Because.")
        assert opened.title == "Add x"
        assert opened.body.startswith("Because.")
        assert (await session.refresh()).pr_number == opened.number
        again = await session.create_pull_request(title="Add x now")
        assert (again.number, again.title) == (opened.number, "Add x now")


async def test_same_session_id_is_the_same_session(client: HarvestClient) -> None:
    key = f"task-{uuid.uuid4()}"
    arguments: dict[str, Any] = {"agent": "scripted", "session_id": key, "network": "none"}
    first = await client.create_session("owner", "repo", **arguments).start()
    again = await client.create_session("owner", "repo", **arguments).start()
    assert first.id == again.id
    assert first.session_id == key
    both = await asyncio.gather(
        *(client.create_session(agent="scripted", session_id=f"{key}-2").start() for _ in range(4))
    )
    assert len({session.id for session in both}) == 1
    with pytest.raises(KeyTaken, match="works on owner/repo"):
        await client.create_session("your-org", "your-repo", session_id=key).start()
    assert "README.md" in await client.session(key).exec("ls")
    assert await client.session(first.id).send_prompt(script({"text": "hi"})) == "hi"
    with pytest.raises(NotFound):
        await client.session("no-such-key").refresh()


async def test_leaving_the_context_pauses(client: HarvestClient) -> None:
    async with client.create_session("owner", "repo", agent="scripted") as session:
        async for chunk in session.send_prompt_stream(
            script({"write": {"path": "half", "content": "x"}}, {"hang": 600})
        ):
            if isinstance(chunk, ToolEnded):
                break
    assert session.status == "paused"
    await session.wait_until_running()
    assert "half" in await session.exec("ls")
    await session.terminate()
    assert session.status == "terminated"


async def test_error_in_context_pauses_and_is_raised(client: HarvestClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.create_session(agent="scripted", network="none") as session:
            await session.wait_until_running()
            raise ZeroDivisionError
    assert (await session.refresh()).status == "paused"


async def test_cancelled_context_pauses(client: HarvestClient) -> None:
    session = client.create_session(agent="scripted", network="none")
    entered = asyncio.Event()

    async def work() -> None:
        async with session:
            await session.wait_until_running()
            entered.set()
            await asyncio.sleep(3600)

    task = asyncio.ensure_future(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await session.refresh()).status == "paused"


async def test_session_that_is_not_started_says_so(client: HarvestClient) -> None:
    session = client.create_session("owner", "repo")
    with pytest.raises(NotStarted, match="start"):
        await session.exec("true")


async def test_failed_start_is_reported(client: HarvestClient) -> None:
    session = client.create_session("owner", "repo", branch="no-such-branch", agent="scripted")
    with pytest.raises((SessionEnded, HarvestError), match="no-such-branch"):
        async with session:
            await session.wait_until_running()
