"""Decoding in pieces gives what `json.loads` gives."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.input import json_pieces
from tests.scale import sized

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner), st.lists(st.integers()), st.dictionaries(st.text(max_size=3), inner)),
    max_leaves=30,
)
INDENTS = st.sampled_from([None, 0, 3])
PIECES = st.sampled_from([1, 2, 7, 40, 1000])


def outcome(decode: Callable[[str], Any], text: str) -> object:
    """Return the value and its exact text, or None if the text is no JSON."""
    try:
        value = decode(text)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value)


def in_pieces(text: str, num_chars: int) -> Any:
    return json_pieces.loads(text, object_pairs_hook=dict, parse_constant=refuse, piece_chars=num_chars)


def refuse(name: str) -> Any:
    raise ValueError(name)


@settings(max_examples=sized(100, 2000), deadline=None)
@given(VALUES, INDENTS, PIECES)
def test_any_value_is_decoded_as_by_json(value: object, indent: int | None, num_chars: int) -> None:
    text = json.dumps(value, indent=indent)
    assert in_pieces(text, num_chars) == json.loads(text)


@settings(max_examples=sized(300, 20_000), deadline=None)
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
