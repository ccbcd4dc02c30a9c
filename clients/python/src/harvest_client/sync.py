"""The client for programs without an event loop: the same names, without `async` and `await`."""

from ._sync.client import HarvestClient
from ._sync.executor import SandboxExecutor
from ._sync.files import Files
from ._sync.manager import SessionManager
from ._sync.sandbox import HarvestSandbox
from ._sync.session import HarvestSession

__all__ = [
    "Files",
    "HarvestClient",
    "HarvestSandbox",
    "HarvestSession",
    "SandboxExecutor",
    "SessionManager",
]
