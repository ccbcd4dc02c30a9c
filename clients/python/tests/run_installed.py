"""Runs the documents' first program with the installed package against a fresh server.

`.ci/python-client` starts it with the interpreter of a fresh environment; it needs no pytest.
"""

from __future__ import annotations

import ast
import asyncio
import os
import sys
import types
import warnings
from pathlib import Path

import harvest_client

from .host import Host, Model


def main() -> None:
    """Starts a server, runs the program and ends the server."""
    assert "site-packages" in str(harvest_client.__file__), "the wheel is not installed"
    document = Path(__file__).parent / "documents/stream.py.txt"
    code = compile(
        document.read_text("utf-8"), document.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    model = Model()
    host = Host(HARVEST_UPSTREAMS_ANTHROPIC_URL=model.url)
    try:
        host.start()
        host.add_repository("RelevanceAI/relevance-api-node")
        os.environ.update(HARVEST_URL=host.url, HARVEST_TOKEN=host.token)
        warnings.simplefilter("ignore", UserWarning)
        asyncio.run(types.FunctionType(code, {"__name__": "program"})())
        print()
        print(f"harvest_client {harvest_client.__version__} from {sys.prefix}")
    finally:
        host.close()


if __name__ == "__main__":
    main()
