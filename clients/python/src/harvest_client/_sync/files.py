# Generated from _async/files.py by scripts/make_sync.py: do not edit.
"""Files in the sandbox of a session."""

from __future__ import annotations

from collections.abc import Callable

from ..decode import decode
from ..models import FileStat
from .connection import Connection


class Files:
    """Reads and writes files; relative paths begin at the first checkout."""

    def __init__(self, connection: Connection, path: Callable[[str], str]) -> None:
        self._connection = connection
        self._session_path = path

    def _path(self) -> str:
        return self._session_path("/files")

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self._connection.bytes(
            "GET", self._path(), query={"path": path}, accept="application/octet-stream"
        )

    def read_text(self, path: str) -> str:
        """The content of a text file in UTF-8."""
        return (self.read(path)).decode()

    def write(self, path: str, content: bytes | str, *, mode: int | None = None) -> FileStat:
        """Writes a file into an existing folder; `mode` is its permissions, such as `0o755`."""
        data = content.encode() if isinstance(content, str) else content
        query = {"path": path, "mode": None if mode is None else f"{mode:o}"}
        stat = self._connection.json("PUT", self._path(), content=data, query=query)
        return decode(FileStat, stat)

    def make_folder(self, path: str) -> FileStat:
        """Makes a folder."""
        query = {"path": path, "kind": "folder"}
        stat = self._connection.json("PUT", self._path(), content=b"", query=query)
        return decode(FileStat, stat)

    def list(self, path: str = ".") -> list[FileStat]:
        """The entries of a folder."""
        pages = self._connection.pages(self._path(), {"path": path})
        return [decode(FileStat, entry) for entry in pages]

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file, or a folder with everything in it."""
        query = {"path": path, "recursive": recursive or None}
        self._connection.bytes("DELETE", self._path(), query=query)
