"""The formats: lines, frames, events, models, text. No server."""

from __future__ import annotations

import dataclasses
import json
import random
from datetime import datetime, timezone
from typing import Any

import pytest

from harvest_client import ProtocolError, models
from harvest_client.decode import decode
from harvest_client.errors import ApiError, KeyTaken, NotFound, Unavailable, api_error
from harvest_client.events import EVENT_TYPES, Layout, TextDelta, parse_event
from harvest_client.models import Exit, status_of
from harvest_client.options import micros, timeout_millis
from harvest_client.progress import build_line
from harvest_client.text import sanitize
from harvest_client.wire import MAX_LINE_BYTES, Frames, Lines

from .host import ROOT

OPENAPI: dict[str, Any] = json.loads((ROOT / "docs/reference/openapi.json").read_text())
SCHEMAS: dict[str, Any] = OPENAPI["components"]["schemas"]
AT = "2026-11-19T04:02:11.908Z"


def pieces(data: bytes, seed: int) -> list[bytes]:
    """The data in random pieces."""
    chance, found = random.Random(seed), []
    while data:
        size = chance.randint(1, 7)
        found.append(data[:size])
        data = data[size:]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_lines_survive_any_split(seed: int) -> None:
    wanted = ["a", "", "ü\u2028\u0085\x0b☃", "last"]
    data = "".join(line + "\n" for line in wanted).encode()
    lines = Lines()
    found = [line.decode() for piece in pieces(data, seed) for line in lines.feed(piece)]
    assert found == wanted
    assert lines.complete


@pytest.mark.parametrize("seed", range(20))
def test_frames_survive_any_split(seed: int) -> None:
    data = (
        'event: snapshot\nretry: 1000\ndata: {"id":1}\n\n: heartbeat\n\n'
        'id: 7\ndata: {"seq":7,\ndata: "text":"\u2028"}\r\n\r\ndata: {"unfinished":'
    ).encode()
    frames = Frames()
    found = [frame for piece in pieces(data, seed) for frame in frames.feed(piece)]
    assert [(frame.event, frame.data) for frame in found] == [
        ("snapshot", {"id": 1}),
        ("", {"seq": 7, "text": "\u2028"}),
    ]


def test_endless_line_is_refused() -> None:
    lines = Lines()
    with pytest.raises(ProtocolError, match="longer"):
        list(lines.feed(b"x" * (MAX_LINE_BYTES + 1)))


def test_unknown_events_and_fields_are_passed_over() -> None:
    assert parse_event({"type": "invented_tomorrow", "seq": 1, "at": AT}) is None
    given = {"type": "text_delta", "seq": 1, "at": AT, "text": "hi", "invented": {"a": 1}}
    event = parse_event(given)
    assert isinstance(event, TextDelta)
    assert (event.text, event.turn) == ("hi", None)
    with pytest.raises(ProtocolError, match="TextDelta has no `text`"):
        parse_event({"type": "text_delta", "seq": 1, "at": AT})
    with pytest.raises(ProtocolError, match=r"TextDelta\.seq is str"):
        parse_event({"type": "text_delta", "seq": "1", "at": AT, "text": ""})


@pytest.mark.parametrize("fraction", ["", ".1", ".908", ".908123", ".908123456"])
def test_times_of_any_precision_are_read(fraction: str) -> None:
    event = parse_event({"type": "compacted", "seq": 1, "at": f"2026-11-19T04:02:11{fraction}Z"})
    assert event is not None
    assert event.at.replace(microsecond=0) == datetime(2026, 11, 19, 4, 2, 11, tzinfo=timezone.utc)


def test_printed_text_controls_no_terminal() -> None:
    text = "a\x1b[31mb\x1b]0;title\x07c\x07\u202ed\r\ne\tf\n"
    assert sanitize(text) == "abc��d\ne\tf\n"
    event = parse_event({"type": "text_delta", "seq": 1, "at": AT, "text": text})
    assert "\x1b" not in str(event)
    for kind in EVENT_TYPES:
        for event in samples(kind, "\x1b[2J\x1b]0;x\x07"):
            assert "\x1b" not in str(event), event


def test_every_event_of_the_api_is_known() -> None:
    variants = [resolve(one) for one in SCHEMAS["Event"]["oneOf"]]
    assert {kind for v in variants for kind in v["properties"]["type"]["enum"]} == set(EVENT_TYPES)


def samples(kind: str, text: str) -> list[Any]:
    """An event of a type with this text in every field that has text."""
    variants = [resolve(one) for one in SCHEMAS["Event"]["oneOf"]]
    schema = next((v for v in variants if v["properties"]["type"].get("enum") == [kind]), None)
    assert schema is not None, f"openapi.json has no event `{kind}`"
    data = {name: sample(one, text) for name, one in schema["properties"].items()}
    event = parse_event({**data, "type": kind})
    assert event is not None
    layout = Layout()
    layout.place(event)
    return [event]


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references."""
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rsplit("/", 1)[1]]
    return schema


def sample(schema: dict[str, Any], text: str) -> Any:
    """A value of a schema."""
    schema = resolve(schema)
    if "oneOf" in schema:
        options = [resolve(one) for one in schema["oneOf"]]
        return sample(next(one for one in options if one.get("type") != "null"), text)
    kinds = schema.get("type")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if "enum" in schema:
        return schema["enum"][0]
    if kind == "object":
        return {name: sample(one, text) for name, one in schema.get("properties", {}).items()}
    if kind == "array":
        return [sample(schema["items"], text)]
    if schema.get("format") == "date-time":
        return AT
    return {"string": text, "integer": 1, "number": 1.5, "boolean": True}.get(str(kind), text)


MODELS: dict[str, Any] = {
    name: kind for name, kind in vars(models).items() if dataclasses.is_dataclass(kind)
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_match_the_api_document(name: str) -> None:
    kind = MODELS[name]
    if name == "Exit":
        for variant in SCHEMAS["Exit"]["oneOf"]:
            assert decode(Exit, sample(variant, "x")).returncode >= 0
        return
    assert decode(kind, sample(SCHEMAS[name], "x")) is not None
    properties, required = SCHEMAS[name]["properties"], set(SCHEMAS[name]["required"])
    for field in dataclasses.fields(kind):
        assert field.name in properties, f"openapi.json has no {name}.{field.name}"
        must = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        assert not must or field.name in required, f"{name}.{field.name} may be absent"


def test_states_have_the_documents_words() -> None:
    for state in SCHEMAS["SessionState"]["enum"]:
        assert status_of(state, "x") in {"starting", "running", "paused", "terminated", "failed"}
    assert status_of("paused", "terminated") == "terminated"
    assert "terminated" in SCHEMAS["StateReason"]["enum"]


def test_errors_are_typed_by_code() -> None:
    def problem(**fields: object) -> bytes:
        return json.dumps({"detail": "no", "hint": "do", "request_id": "req_1", **fields}).encode()

    taken = api_error(409, problem(code="key_taken"))
    assert isinstance(taken, KeyTaken)
    assert (taken.code, taken.hint, taken.request_id) == ("key_taken", "do", "req_1")
    assert str(taken) == "no\nhint: do"
    assert isinstance(api_error(404, problem(code="snapshot_missing")), NotFound)
    assert isinstance(api_error(404, b""), LookupError)
    assert isinstance(api_error(503, b"<html>busy</html>"), Unavailable)
    other = api_error(418, b"[]")
    assert type(other) is ApiError
    assert (other.code, other.status) == ("http_418", 418)


def test_exits_have_the_codes_of_a_shell() -> None:
    codes = [("code", 3, 3), ("signal", 15, 143), ("timeout", None, 124), ("oom", None, 137)]
    for how, value, code in codes:
        assert Exit(how, value).returncode == code


def test_budgets_and_timeouts_are_validated() -> None:
    assert [micros(value) for value in (None, 0.1, "2.5", 3)] == [
        None,
        100_000,
        2_500_000,
        3_000_000,
    ]
    for wrong in (-1, "much", float("nan"), float("inf"), "0.0000001"):
        with pytest.raises(ValueError, match="budget"):
            micros(wrong)
    assert [timeout_millis(value) for value in (None, 30, 0.0001)] == [None, 30_000, 1]
    for wrong_time in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_secs"):
            timeout_millis(wrong_time)


def test_build_lines_are_for_people() -> None:
    assert build_line({"type": "progress", "message": "Fetching the code"}) == "Fetching the code"
    assert build_line({"type": "warning", "message": "odd"}) == "warning: odd"
    step = {"type": "install_step", "command": "npm ci", "millis": 1500}
    assert build_line(step) == "npm ci (1.5 s)"
    assert build_line({"type": "invented"}) == ""
