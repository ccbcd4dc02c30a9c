"""`openapi-python-client` makes a complete client from the API's document, which reads the server.

Its configuration says which media types are bytes; without it the generator leaves those operations
out.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harvest_client import HarvestSession

from .conftest import script
from .host import ROOT, Host

DOCUMENT = ROOT / "docs/reference/openapi.json"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the generated package."""
    folder = tmp_path_factory.mktemp("generated") / "generated_harvest"
    config = Path(__file__).parent / "openapi-python-client.yml"
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none"]
    command += ["--path", str(DOCUMENT), "--output-path", str(folder), "--config", str(config)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stdout + run.stderr, run.stdout + run.stderr
    return folder


def test_generated_client_has_every_operation(generated: Path) -> None:
    document: dict[str, Any] = json.loads(DOCUMENT.read_text())
    methods = {"get", "put", "post", "delete", "patch", "head"}
    wanted = {
        operation["operationId"]
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in methods
    }
    assert {file.stem for file in generated.glob("api/*/*.py")} - {"__init__"} >= wanted
    variants = len(document["components"]["schemas"]["Event"]["oneOf"])
    assert len(list(generated.glob("models/event_*.py"))) >= variants


async def test_generated_client_reads_the_server(
    generated: Path, host: Host, session: HarvestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(generated.parent))
    package = importlib.import_module("generated_harvest")
    events = importlib.import_module("generated_harvest.api.events.event_list")
    sessions = importlib.import_module("generated_harvest.api.sessions.session_list")
    await session.send_prompt(script({"text": "on"}, {"bash": "true"}))
    with package.AuthenticatedClient(base_url=host.url, token=host.token) as client:
        ours = [event.seq async for event in session.events()]
        page = events.sync(session.id, client=client)
        # The turn's snapshot may have been stored meanwhile.
        assert [event.seq for event in page.items][: len(ours)] == ours
        assert {"EventTextDelta", "EventToolEnded"} <= {type(item).__name__ for item in page.items}
        listed = sessions.sync(client=client)
        assert session.id in {item.id for item in listed.items}
