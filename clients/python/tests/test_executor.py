"""Code in fresh sandboxes: `SandboxExecutor` on a real server."""

from __future__ import annotations

import asyncio

import pytest

from harvest_client import (
    ExecutionResult,
    HarvestClient,
    SandboxExecutor,
    ServerUnreachable,
    Unauthorized,
)

from .host import Host, free_port


async def run(client: HarvestClient, code: str, **arguments: object) -> ExecutionResult:
    """Executes code."""
    return await SandboxExecutor(client).execute(code, **arguments)  # type: ignore[arg-type]


async def test_output_and_exit_code_are_captured(client: HarvestClient) -> None:
    code = 'import sys; print("Hello ☃"); print("bad", file=sys.stderr); sys.exit(3)'
    result = await run(client, code, timeout_secs=30)
    assert (result.returncode, result.stdout, result.stderr) == (3, "Hello ☃\n", "bad\n")
    assert (result.status, result.sandbox_id[:4]) == ("completed", "sbx_")
    assert isinstance(result.duration_secs, float)
    assert result.duration_secs > 0


async def test_whole_output_is_returned(client: HarvestClient) -> None:
    size = 3_000_000
    result = await run(client, f'import sys; sys.stdout.write("x" * {size})')
    assert result.stdout == "x" * size


async def test_time_limit_ends_the_code(client: HarvestClient) -> None:
    result = await run(
        client, 'print("on", flush=True); import time; time.sleep(600)', timeout_secs=1
    )
    assert (result.returncode, result.status, result.stdout) == (124, "timeout", "on\n")


async def test_environment_folder_and_language(client: HarvestClient) -> None:
    result = await run(client, "echo $A; pwd", lang="bash", env={"A": "b c"}, cwd="/tmp")
    assert result.stdout == "b c\n/tmp\n"
    result = await run(client, "console.log(6 * 7)", lang="node")
    assert result.stdout == "42\n"
    for wrong in ({"lang": "cobol"}, {"timeout_secs": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            await run(client, "1", **wrong)


async def test_state_volume_is_writable(client: HarvestClient) -> None:
    result = await run(client, 'with open("/mnt/state/test.txt", "w") as f: f.write("test")')
    assert result.returncode == 0, result.stderr


async def test_sandbox_is_removed_afterwards(client: HarvestClient, host: Host) -> None:
    results = await asyncio.gather(*(run(client, "raise SystemExit(1)") for _ in range(3)))
    assert [result.returncode for result in results] == [1, 1, 1]
    assert len({result.sandbox_id for result in results}) == 3
    left = {sandbox["id"] for sandbox in host.api("GET", "sandboxes")["items"]}
    assert not left & {result.sandbox_id for result in results}


async def test_killed_code_is_a_result(client: HarvestClient) -> None:
    result = await run(client, "import os; os.kill(os.getpid(), 9)")
    assert (result.returncode, result.status) == (137, "signal")


async def test_refusal_is_a_result(client: HarvestClient, host: Host) -> None:
    made = host.api(
        "POST", "tokens", {"name": "m", "user": {"name": "M", "email": "m@example.org"}}
    )
    async with HarvestClient(host.url, made["value"]) as member:
        assert (await run(member, "print(1)")).stdout == "1\n"
        host.api("PATCH", "users/m@example.org/limits", {"sandboxes": 0})
        result = await run(member, "print(1)")
    assert (result.status, result.returncode, result.stdout) == ("failed", 125, "")
    assert "hint: " in result.stderr
    missing = await run(client, "print(1)", cwd="/no/such/folder")
    assert (missing.returncode, missing.status) == (125, "failed")
    assert "/no/such/folder" in missing.stderr
    async with HarvestClient(host.url, "hv_wrong") as stranger:
        refused = await run(stranger, "print(1)")
        assert (refused.returncode, refused.status) == (125, "failed")
        with pytest.raises(Unauthorized):
            await stranger.sessions()


async def test_members_code_sees_no_shared_folder(host: Host) -> None:
    user = {"name": "S", "email": "s@example.org"}
    made = host.api("POST", "tokens", {"name": "s", "user": user})
    code = "import os; print(os.path.ismount('/mnt/state'))"
    async with HarvestClient(host.url, made["value"]) as member:
        results = await asyncio.gather(*(run(member, code) for _ in range(4)))
    assert [result.stdout for result in results] == ["False\n"] * 4


async def test_only_an_unreachable_server_raises() -> None:
    executor = SandboxExecutor(url=f"http://127.0.0.1:{free_port()}", token="t")
    with pytest.raises(ServerUnreachable):
        await executor.execute("print(1)")


def test_one_executor_serves_several_loops(environment: None) -> None:
    executor = SandboxExecutor()
    for _ in range(2):
        assert asyncio.run(executor.execute("print(1)")).stdout == "1\n"
