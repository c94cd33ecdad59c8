"""Decoding in pieces gives what `json.loads` gives."""

import gc
import json
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request_limits import MIN_ARRAY_IDS
from baton.gateway.input import json_pieces, strict_json
from baton.gateway.input.strict_json import parse_body
from baton.runtime.process import loop_time
from tests.scale import sized

MAX_VALUES = 100_000
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner), st.lists(st.integers()), st.dictionaries(st.text(max_size=3), inner)),
    max_leaves=30,
)
INDENTS = st.sampled_from([None, 0, 3])
PIECES = st.sampled_from([1, 2, 7, 40, 47, 1000])


def outcome(decode: Callable[[str], Any], text: str) -> object:
    """Return the value and its exact text, or None if the text is no JSON."""
    try:
        value = decode(text)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value)


def in_pieces(text: str, num_chars: int) -> Any:
    return json_pieces.loads(
        text, object_pairs_hook=dict, parse_constant=refuse, max_values=MAX_VALUES, piece_chars=num_chars
    )


def refuse(name: str) -> Any:
    raise ValueError(name)


@settings(max_examples=sized(50, 2000), deadline=None)
@given(VALUES, INDENTS, PIECES)
def test_any_value_is_decoded_as_by_json(value: object, indent: int | None, num_chars: int) -> None:
    text = json.dumps(value, indent=indent)
    assert in_pieces(text, num_chars) == json.loads(text)


@settings(max_examples=sized(150, 6_000), deadline=None)
@given(VALUES, st.integers(0, 200), st.sampled_from('[]{},:"\\ 0-e.\n1tx'), st.booleans(), PIECES)
def test_any_malformed_text_is_refused_as_by_json(
    value: object, at: int, character: str, replaces: bool, num_chars: int
) -> None:
    text = json.dumps(value)
    text = text[:at] + character + text[at + replaces :]
    expected = outcome(lambda t: json.loads(t, object_pairs_hook=dict, parse_constant=refuse), text)
    assert outcome(lambda t: in_pieces(t, num_chars), text) == expected


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("[" + "1, " * 50 + "x]", 151),
        ("[" + "1, " * 50 + "1 1, 2]", 153),
        ('{"a": [' + "1," * 50 + "1", 108),
        ('{"a" 1}', 5),
        ("{'a': 1}", 1),
        ("[1] 2", 4),
        ("", 0),
    ],
)
def test_error_names_the_position_in_the_whole_text(text: str, position: int) -> None:
    with pytest.raises(json.JSONDecodeError) as error:
        in_pieces(text, 20)
    assert error.value.pos == position


STRING_PARTS = st.sampled_from(
    [
        "a",
        "é",
        "\\n",
        "\\\\",
        '\\"',
        "\\u0041",
        "\\ud83d",
        "\\ude00",
        "\\ud83d\\ude00",
        "ud83d",
        "\\u12",
        "\t",
        "\\x",
        '"',
    ]
)
STRINGS = st.lists(STRING_PARTS, max_size=8).map("".join).flatmap(lambda unit: st.integers(1, 40).map(unit.__mul__))


@settings(max_examples=sized(150, 6_000), deadline=None)
@given(STRINGS, STRINGS, PIECES)
def test_long_string_is_decoded_or_refused_as_by_json(first: str, second: str, num_chars: int) -> None:
    text = f'["{first}{second}", {{"{second}": "{first}"}}]'
    expected = outcome(lambda t: json.loads(t, object_pairs_hook=dict, parse_constant=refuse), text)
    assert outcome(lambda t: in_pieces(t, num_chars), text) == expected


class RecordingDecoder(json.JSONDecoder):
    """A decoder that records the characters of each call."""

    longest = 0
    num_copied = 0
    num_calls = 0

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        value, end = super().raw_decode(s, idx)
        RecordingDecoder.num_calls += 1
        RecordingDecoder.num_copied += 0 if idx else len(s)
        RecordingDecoder.longest = max(RecordingDecoder.longest, end - idx)
        return value, end


@pytest.mark.parametrize(
    "value",
    ["a" * 10_000, "\u20ac" * 10_000, {"k" * 10_000: [1.5] * 5000}, [7] * 5000, {"a": {"b": "c" * 10_000, "d": 1}}],
    ids=["string", "escapes", "key and fractions", "ids", "object"],
)
def test_no_call_of_the_decoder_gets_much_text(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "JSONDecoder", RecordingDecoder)
    RecordingDecoder.longest = 0
    assert in_pieces(json.dumps(value), 1000) == (array("I", value) if value == [7] * 5000 else value)
    assert 0 < RecordingDecoder.longest <= 1002


def test_short_strings_with_escapes_are_not_copied_with_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "JSONDecoder", RecordingDecoder)
    RecordingDecoder.num_copied = 0
    assert in_pieces(json.dumps(["\n"] * 5000), 30_000) == ["\n"] * 5000
    assert RecordingDecoder.num_copied < 100 * 5000


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "text", "text": "x, [1]"}] * 2000,
        {f"k{n}": n for n in range(5000)},
        ["a\n", 1] * 3000,
        ["a", *range(10_000)],
        [{"role": "user", "content": [{"text": "}"}]}] * 2000,
        {"x": {f"k{n}": {"a": [n]} for n in range(3000)}},
    ],
    ids=["parts", "members", "mixed", "numbers after a string", "messages", "nested"],
)
def test_many_small_values_take_few_calls_of_the_decoder(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call costs as much as 30 values that are decoded together."""
    monkeypatch.setattr(json, "JSONDecoder", RecordingDecoder)
    RecordingDecoder.num_calls = 0
    text = json.dumps(value)
    assert in_pieces(text, 1000) == value
    assert RecordingDecoder.num_calls < 5 + 4 * len(text) / 1000


def test_long_list_of_token_ids_is_an_array() -> None:
    ids = list(range(MIN_ARRAY_IDS))
    assert in_pieces(json.dumps([ids, ids[1:], [*ids, 0.5]]), 100) == [array("I", ids), ids[1:], [*ids, 0.5]]
    assert in_pieces(json.dumps([*ids, 2**32]), 100) == [*ids, 2**32]
    assert in_pieces(json.dumps([*ids, -1]), 100) == [*ids, -1]
    for num_chars in (100, 10_000):  # decoded by itself, or together with what is around it
        value = in_pieces(json.dumps({"a": [[ids], 0, {"b": ids}], "c": 0}), num_chars)
        assert value == {"a": [[array("I", ids)], 0, {"b": array("I", ids)}], "c": 0}


def num_scalars(value: object) -> int:
    """Return the number of keys and other strings, numbers and constants."""
    if isinstance(value, dict):
        return sum(1 + num_scalars(item) for item in value.values())
    return sum(map(num_scalars, value)) if isinstance(value, list) else 1


@settings(max_examples=sized(50, 2000), deadline=None)
@given(VALUES.filter(lambda value: num_scalars(value) > 0), PIECES)
def test_values_are_counted_exactly(value: Any, num_chars: int) -> None:
    text = json.dumps(["x", value])
    number = 1 + num_scalars(value)
    options: dict[str, Any] = {"object_pairs_hook": dict, "parse_constant": refuse, "piece_chars": num_chars}
    assert json_pieces.loads(text, max_values=number, **options) == ["x", value]
    with pytest.raises(json_pieces.TooManyValues):
        json_pieces.loads(text, max_values=number - 1, **options)


@pytest.mark.parametrize(
    ("unit", "number"), [('"",', 1), ("1.5,", 1), ("-1,", 1), ("null,", 1), ("[1,2],", 2), ('{"a":"b"},', 2)]
)
def test_values_are_counted(unit: str, number: int) -> None:
    def decode(max_values: int) -> Any:
        text = "[" + unit * 50 + "0.5]"
        return json_pieces.loads(
            text, object_pairs_hook=dict, parse_constant=refuse, max_values=max_values, piece_chars=20
        )

    assert decode(50 * number + 1)
    with pytest.raises(json_pieces.TooManyValues):
        decode(50 * number)


@pytest.mark.parametrize("text", ['{"a": [1, 2, {"b": "c"}]}', '{"a": [1, 2'])
def test_text_is_freed_without_a_garbage_collection(text: str) -> None:
    gc.collect()
    gc.disable()
    try:
        outcome(lambda text: in_pieces(text, 1000), text)
        assert gc.collect() == 0
    finally:
        gc.enable()


async def test_small_body_of_many_nested_lists_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing 32 KiB of them takes 36 ms, and of strings 1 ms."""
    threads: list[threading.Thread] = []

    def parse(body: bytes, what: str) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    monkeypatch.setattr(strict_json, "parse_object", parse)
    for number in (loop_time.JSON_BYTES // strict_json.CONTAINER_BYTES, 1):
        await parse_body(b'{"a": [' + b",".join([b"[" * 20 + b"]" * 20] * (number // 20 + 1)) + b"]}")
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
