"""Functions for scripts, each also with `.remote(…)`: they block, and use the server of the
environment. Programs with an event loop use the methods of `HarvestClient`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from ._sync.client import HarvestClient
from .models import Repository
from .progress import Progress
from .results import BuildResult
from .secret import Secret

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Function(Generic[Arguments, Result]):
    """A function that is also called with `.remote(…)`."""

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        self._function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._function(*args, **kwargs)

    def remote(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Calls the function; the server does the work in any case."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"

    @staticmethod
    def lookup(app_name: str, name: str) -> Function[..., Any]:
        """The function of this name. The name of the application has no meaning here."""
        if name not in _FUNCTIONS:
            raise LookupError(f"there is no function `{name}`; there are {', '.join(_FUNCTIONS)}")
        return _FUNCTIONS[name]


class App:
    """Stands for an application of functions: `App.lookup(NAME)`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def lookup(cls, name: str) -> App:
        """The application of this name."""
        return cls(name)


@Function
def register_repository(
    repo_owner: str,
    repo_name: str,
    default_branch: str | None = "main",
    *,
    url: str | None = None,
    secret: str | None = None,
) -> Repository:
    """Registers a repository for sessions and scheduled builds."""
    with HarvestClient() as client:
        return client.register_repository(
            repo_owner, repo_name, default_branch, url=url, secret=secret
        )


@Function
def build_repo_image(
    repo_owner: str, repo_name: str, branch: str | None = "main", *, progress: Progress = None
) -> BuildResult:
    """Builds the state that sessions on a repository start from."""
    with HarvestClient() as client:
        return client.build_repository(repo_owner, repo_name, branch, progress=progress)


@Function
def build_single_repo_image(
    repo_owner: str, repo_name: str, *, progress: Progress = None
) -> BuildResult:
    """Builds a repository's own base branch."""
    with HarvestClient() as client:
        return client.build_repository(repo_owner, repo_name, progress=progress)


@Function
def refresh_all_images() -> dict[str, Any]:
    """Looks at all repositories now and rebuilds those that moved."""
    with HarvestClient() as client:
        run = client.refresh_images()
    return {
        "status": run.status,
        "timestamp": run.timestamp,
        "image_rebuilt": run.image_rebuilt,
        "rebuilt": list(run.rebuilt),
    }


@Function
def create_sandbox(
    session_id: str,
    repo_owner: str,
    repo_name: str,
    control_plane_url: str | None = None,
    sandbox_auth_token: str | Secret | None = None,
) -> dict[str, Any]:
    """Creates a session whose sandbox starts in the background; `HarvestSandbox(session_id)` and
    `client.session(session_id)` continue it.
    """
    if control_plane_url is not None or sandbox_auth_token is not None:
        warnings.warn(
            "control_plane_url and sandbox_auth_token are ignored: a sandbox dials no server",
            stacklevel=3,
        )
    with HarvestClient() as client:
        session = client.create_session(repo_owner, repo_name, session_id=session_id)
        session.start()
        sandbox_id = session.sandbox_id()
        return {"sandbox_id": sandbox_id, "session_id": session_id, "status": "warming"}


_FUNCTIONS: dict[str, Function[..., Any]] = {
    function.__name__: function
    for function in (
        register_repository,
        build_repo_image,
        build_single_repo_image,
        refresh_all_images,
        create_sandbox,
    )
}
