"""A real server for the tests: its own home in a temporary folder, a repository, and stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BINARY = os.environ.get("HARVEST_BINARY", str(ROOT / "target/debug/harvest"))


def eventually(what: str, probe: Callable[[], Any], secs: float = 60) -> Any:
    """The first true value of the probe."""
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"waited in vain for {what}")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Host:
    """A server on its own home. A restarted one keeps its port."""

    def __init__(self, **env: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="hvpy"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        hidden = ("HARVEST_", "ANTHROPIC_", "CLAUDE_", "GITHUB_", "GEMINI_", "SENTRY_", "LINEAR_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.env = {
            **kept,
            "HARVEST_HOME": str(self.home / "home"),
            "HARVEST_CONFIG": "/dev/null",
            "HARVEST_IMAGE": "claude",
            "HARVEST_SCHEDULE": "false",
            "HARVEST_POOL": "0",
            "NO_COLOR": "1",
            **env,
        }

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        command = [BINARY, "up", "--keep", "--listen", f"127.0.0.1:{self.port}"]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        eventually("the server", self._ready)

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "log").read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """Kills the server with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends the server and removes everything it made."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.cli("gc", "--all", "--yes", check=False)
        shutil.rmtree(self.home, ignore_errors=True)

    def cli(self, *arguments: str, check: bool = True) -> str:
        """Runs the CLI and returns its output."""
        run = subprocess.run(
            [BINARY, "-q", *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0 or not check, run.stderr
        return run.stdout

    @property
    def token(self) -> str:
        """The admin's token."""
        return (self.home / "home/token").read_text().strip()

    def api(self, method: str, path: str, body: object = None) -> Any:
        """A request without the client."""
        request = urllib.request.Request(
            f"{self.url}/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self.token}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def add_repository(self, *names: str) -> None:
        """Puts a repository on the local forge, registers it under all names and builds it."""
        folder = self.home / "calc"
        folder.mkdir()
        (folder / "README.md").write_text("A calculator.\n")
        (folder / "package.json").write_text('{"scripts": {"test": "echo 3 passing"}}\n')
        git = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", "-C", str(folder)]
        for arguments in (["init", "-qb", "main"], ["add", "-A"], ["commit", "-qm", "Begin"]):
            subprocess.run([*git, *arguments], check=True)
        self.cli("repo", "add", str(folder))
        self.cli("repo", "build", "calc")
        for name in names:
            url = f"{self.url}/forge/local/calc.git"
            body = {"url": url, "name": name, "secret": "FORGE_CALC", "base": "main"}
            self.api("POST", "repositories", body)


class Model(ThreadingHTTPServer):
    """Stands for the model service: answers each request of the Messages API with one text."""

    TEXT = "All tests pass now."

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ModelHandler)
        self.keys: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _ModelHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answers with one text, streamed if asked."""
        assert isinstance(self.server, Model)
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.keys.add(self.headers.get("x-api-key") or self.headers["authorization"])
        usage = {"input_tokens": 1, "output_tokens": 1}
        message = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": request.get("model", "m"),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        if not request.get("stream"):
            text = [{"type": "text", "text": Model.TEXT}]
            whole = {**message, "content": text, "stop_reason": "end_turn"}
            self._answer("application/json", json.dumps(whole).encode())
            return
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        delta = {"index": 0, "delta": {"type": "text_delta", "text": Model.TEXT}}
        ended = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage}
        events: list[tuple[str, dict[str, Any]]] = [
            ("message_start", {"message": message}),
            ("content_block_start", block),
            ("content_block_delta", delta),
            ("content_block_stop", {"index": 0}),
            ("message_delta", ended),
            ("message_stop", {}),
        ]
        frames = [f"event: {n}\ndata: {json.dumps({'type': n, **d})}\n\n" for n, d in events]
        self._answer("text/event-stream", "".join(frames).encode())

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class Proxy:
    """A TCP proxy that cuts event streams, or drops answers."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        # Event streams end after so many bytes.
        self.cut_after: int | None = None
        self._streams: set[socket.socket] = set()
        self.drop_answers = 0
        self.connections = 0
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops accepting."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            upstream = socket.create_connection(("127.0.0.1", self.target_port))
            with upstream:
                threading.Thread(target=self._upload, args=(client, upstream), daemon=True).start()
                self._download(upstream, client)

    def _upload(self, client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self.requests.append(data)
                if b"text/event-stream" in data:
                    self._streams.add(client)
                upstream.sendall(data)
            upstream.shutdown(socket.SHUT_WR)

    def _download(self, upstream: socket.socket, client: socket.socket) -> None:
        left: int | None = None
        while data := upstream.recv(4096):
            if self.drop_answers > 0:
                self.drop_answers -= 1
                client.shutdown(socket.SHUT_RDWR)
                return
            if self.cut_after is None or client not in self._streams:
                client.sendall(data)
                continue
            left = self.cut_after if left is None else left
            client.sendall(data[:left])
            left -= len(data)
            if left <= 0:
                client.shutdown(socket.SHUT_RDWR)
                return
