"""Client of Harvest: background coding agents on machines you own.

The names here are asynchronous; `harvest_client.sync` has the same ones for programs without an
event loop. The functions (`build_repo_image` and the like) block in both.
"""

from ._async.client import HarvestClient
from ._async.executor import SandboxExecutor
from ._async.files import Files
from ._async.manager import SessionManager
from ._async.sandbox import HarvestSandbox
from ._async.session import HarvestSession
from .errors import (
    ApiError,
    Conflict,
    ConnectionLost,
    CursorGone,
    Exists,
    Forbidden,
    HarvestError,
    InvalidRequest,
    KeyTaken,
    LimitReached,
    NoSpace,
    NotFound,
    NotStarted,
    ProtocolError,
    RemoteUnavailable,
    ServerUnreachable,
    SessionEnded,
    TurnFailed,
    Unauthorized,
    Unavailable,
)
from .events import Event, TextDelta
from .functions import (
    App,
    Function,
    build_repo_image,
    build_single_repo_image,
    create_sandbox,
    refresh_all_images,
    register_repository,
)
from .results import BuildResult, ExecResult, ExecutionResult, Reply, SessionState
from .secret import Secret

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "App",
    "BuildResult",
    "Conflict",
    "ConnectionLost",
    "CursorGone",
    "Event",
    "ExecResult",
    "ExecutionResult",
    "Exists",
    "Files",
    "Forbidden",
    "Function",
    "HarvestClient",
    "HarvestError",
    "HarvestSandbox",
    "HarvestSession",
    "InvalidRequest",
    "KeyTaken",
    "LimitReached",
    "NoSpace",
    "NotFound",
    "NotStarted",
    "ProtocolError",
    "RemoteUnavailable",
    "Reply",
    "SandboxExecutor",
    "Secret",
    "ServerUnreachable",
    "SessionEnded",
    "SessionManager",
    "SessionState",
    "TextDelta",
    "TurnFailed",
    "Unauthorized",
    "Unavailable",
    "build_repo_image",
    "build_single_repo_image",
    "create_sandbox",
    "refresh_all_images",
    "register_repository",
]
