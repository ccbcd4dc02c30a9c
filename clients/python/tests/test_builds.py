"""Repositories: registering and building them, with the functions for scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import harvest_client
from harvest_client import (
    App,
    Function,
    HarvestClient,
    build_repo_image,
    build_single_repo_image,
    create_sandbox,
    refresh_all_images,
    register_repository,
)

from .host import Host


def test_build_gives_the_documented_result(environment: None) -> None:
    said: list[str] = []
    result = build_repo_image.remote("owner", "repo", "main", progress=said.append)
    assert result["success"]
    assert (result["status"], result["repo"], result["branch"]) == ("success", "owner/repo", "main")
    assert str(result["snapshot_id"]).startswith("snp_")
    assert len(str(result["commit"])) == 40
    assert result["duration_secs"] > 0
    assert "package_manager" in result
    assert len(said) >= 3
    assert build_single_repo_image("owner", "repo")["success"]


def test_failed_build_is_a_result(environment: None, host: Host) -> None:
    setup = host.home / "broken"
    (setup / ".harvest").mkdir(parents=True)
    (setup / ".harvest/setup.sh").write_text("echo no luck >&2; exit 1\n")
    host.cli("repo", "add", "--all", str(setup))
    result = build_repo_image.remote("local", "broken", None)
    assert (result["success"], result["status"]) == (False, "failed")
    assert "setup.sh" in result["error"]
    host.api("DELETE", "repositories/local/broken")
    unknown = build_repo_image.remote("no-such-owner-7f3a", "no-such-repo-7f3a")
    assert not unknown["success"]
    assert unknown["error"]
    other = build_repo_image.remote("owner", "repo", "another-branch")
    assert not other["success"]


def test_registering_again_keeps_the_repository(environment: None, host: Host) -> None:
    url = f"{host.url}/forge/local/calc.git"
    first = register_repository("new", "one", url=url, secret="FORGE_CALC")
    again = register_repository.remote(repo_owner="new", repo_name="one", default_branch="main")
    assert (first.name, first.base, again.name) == ("new/one", "main", "new/one")
    assert host.api("GET", "repositories/new/one")["url"] == url


def test_refresh_gives_the_documented_result(environment: None) -> None:
    result = refresh_all_images.remote()
    assert result["status"] == "success"
    assert {"timestamp", "image_rebuilt"} <= set(result)


def test_functions_are_found_by_name() -> None:
    assert App.lookup("open-inspect").name == "open-inspect"
    assert Function.lookup("open-inspect", "build_repo_image") is build_repo_image
    assert build_repo_image.__doc__
    with pytest.raises(LookupError, match="register_repository"):
        Function.lookup("open-inspect", "no_such_function")


def test_created_sandbox_is_warming(environment: None, host: Host) -> None:
    with pytest.warns(UserWarning, match="control_plane_url"):
        made = create_sandbox.remote(
            session_id="warm-1",
            repo_owner="owner",
            repo_name="repo",
            control_plane_url="https://plane.example.org",
            sandbox_auth_token="token",
        )
    assert made["status"] == "warming"
    assert made["sandbox_id"].startswith("sbx_")
    assert host.api("GET", "sessions?key=warm-1")["items"][0]["sandbox"] == made["sandbox_id"]


async def test_progress_is_for_terminals(
    client: HarvestClient, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.build_repository("owner", "repo")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    await client.build_repository("owner", "repo")
    assert "snapshot" in capfd.readouterr().err


def test_modal_tokens_are_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="ignored"):
        HarvestClient("http://127.0.0.1:1", "t", modal_token_id="ak", modal_token_secret="as")


def test_local_server_is_found(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARVEST_URL", raising=False)
    monkeypatch.delenv("HARVEST_TOKEN", raising=False)
    monkeypatch.setenv("HARVEST_HOME", str(host.home / "home"))
    assert build_single_repo_image("owner", "repo")["success"]
    monkeypatch.setenv("HARVEST_HOME", str(tmp_path))
    with pytest.raises(harvest_client.ServerUnreachable, match="harvest up"):
        refresh_all_images()
    # The token of the local server is not sent elsewhere.
    monkeypatch.setenv("HARVEST_HOME", str(host.home / "home"))
    elsewhere = HarvestClient("http://127.0.0.1:1").connection.location
    assert elsewhere.token is None
    assert HarvestClient(host.url).connection.location.token is not None
    with pytest.raises(ValueError, match="without a login"):
        _ = HarvestClient("http://user:password@127.0.0.1:1").connection.location
