"""Turns JSON into dataclasses. Unknown fields are passed over, so that a newer server is read."""

from __future__ import annotations

import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, cast

from .errors import ProtocolError

Decoded = TypeVar("Decoded")

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


def decode(kind: type[Decoded], value: object) -> Decoded:
    """The value as an instance of `kind`; raises `ProtocolError` when it is none."""
    return cast(Decoded, _decode(kind, value, kind.__name__))


def _decode(kind: Any, value: object, at: str) -> Any:  # noqa: PLR0911
    if kind is Any or kind is object:
        return value
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
        return _decode(kind, value, at)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, part, at) for part in _expect(list, value, at))
    if origin is dict:
        item = typing.get_args(kind)[1]
        return {key: _decode(item, part, at) for key, part in _expect(dict, value, at).items()}
    if kind is datetime:
        return _time(_expect(str, value, at), at)
    if kind is float:
        return float(_expect((int, float), value, at))
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind, _expect(dict, value, at))
    return _expect(kind, value, at)


def _expect(kind: Any, value: object, at: str) -> Any:
    # A bool is an int to Python, not to JSON.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ProtocolError(
            f"the server's answer is not understood: {at} is {type(value).__name__}",
            "the client may be older or newer than the server",
        )
    return value


def _record(kind: type, data: dict[str, object]) -> Any:
    given: dict[str, object] = {}
    for name, key, hint, required in shape(kind):
        if key in data:
            given[name] = _decode(hint, data[key], f"{kind.__name__}.{name}")
        elif required:
            raise ProtocolError(
                f"the server's answer is not understood: {kind.__name__} has no `{key}`",
                "the client may be older or newer than the server",
            )
    return kind(**given)


@cache
def shape(kind: type) -> tuple[tuple[str, str, Any, bool], ...]:
    """The fields of a dataclass: name, name in JSON, type, and whether it must be there.

    The name in JSON differs where it is a keyword or a method: `field(metadata={"json": …})`.
    """
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            field.name,
            field.metadata.get("json", field.name),
            hints[field.name],
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
        if field.init
    )


def _time(text: str, at: str) -> datetime:
    # Python 3.10 reads neither `Z` nor fractions of other than 3 or 6 digits.
    match = _TIME.fullmatch(text)
    if match is None:
        raise ProtocolError(f"the server's answer is not understood: {at} is not a time")
    base, fraction, zone = match.groups()
    micros = ((fraction or "") + "000000")[:6]
    return datetime.fromisoformat(f"{base}.{micros}{'+00:00' if zone == 'Z' else zone}")
