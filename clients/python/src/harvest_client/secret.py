"""Values that never appear in output: tokens and keys."""

from __future__ import annotations

from typing import NoReturn

MASK = "***"


class Secret:
    """A secret value. `repr`, `str` and formatting give `***`; `reveal()` gives the value."""

    __slots__ = ("_value",)

    def __init__(self, value: str | Secret) -> None:
        self._value: str = value.reveal() if isinstance(value, Secret) else value

    def reveal(self) -> str:
        """The value itself."""
        return self._value

    def __repr__(self) -> str:
        return MASK

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return MASK

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.reveal() == self._value

    def __hash__(self) -> int:
        return hash(("Secret", self._value))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")


def secret(value: str | Secret | None) -> Secret | None:
    """Wraps a value; an empty one counts as absent."""
    return Secret(value) if value else None
