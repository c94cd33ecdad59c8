"""JSON objects and lists that arrive in pieces, compared with the json module of Python."""

import json
import math
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.output.values.json_container import MAX_JSON_DEPTH, JsonContainerReader
from baton.gateway.output.values.typed_values import read_container

MARKS = ("{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "\xa0", "\x01", "é", "x", "-", "-0", "01", "1.50", "1e3")
MARKS += ("1E400", "true", "nul", "NaN", "Infinity", '"a"', '"a": ', '"\\u00e9"', '"\\ud800"', '"[{"', "\\/")
HUGE = "number beyond doubles: "
KEYS = st.sampled_from(("a", "b", "é"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=12)


def reference(text: str) -> str | None:
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        value = json.loads(text, parse_float=finite_or_marked, parse_constant=int)
    except ValueError:
        return None
    written = re.sub(f'"{HUGE}([^"]*)"', r"\1", json.dumps(value, ensure_ascii=False))
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def finite_or_marked(text: str) -> float | str:
    return float(text) if math.isfinite(float(text)) else HUGE + text


def read(text: str, cuts: list[int]) -> str | None:
    reader = JsonContainerReader()
    while text:
        cut = cuts.pop() if cuts else 1
        reader.put(text[:cut])
        text = text[cut:]
    found = reader.finish()
    assert found is None or found.is_object == found.text.startswith("{")
    return None if found is None else found.text


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from(MARKS), max_size=10).map("".join)
    | st.tuples(VALUES, st.sampled_from((None, 1)), st.booleans()).map(
        lambda case: json.dumps(case[0], indent=case[1], ensure_ascii=case[2])
    ),
    st.lists(st.integers(1, 9), max_size=30),
    st.none() | st.tuples(st.integers(0, 60), st.sampled_from(MARKS)),
)
def test_pieces_are_read_as_json_reads_the_whole(text: str, cuts: list[int], change: tuple[int, str] | None) -> None:
    if change is not None:
        text = text[: change[0]] + change[1] + text[change[0] :]
    assert read(text, cuts) == reference(text)


def test_last_value_of_a_key_counts_in_the_place_of_the_first() -> None:
    assert read('{"a": [1], "b": 2, "\\u0061": {}}', []) == '{"a": {}, "b": 2}'


def test_depth_counts_brackets_outside_of_strings() -> None:
    deep = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    quoted = json.dumps({"a": "[" * 1000 + '\\"' * 1000})
    for text in (deep, quoted):
        whole = read_container(text)
        assert whole is not None
        assert read(text, []) == whole.text == text
    assert read(f"[{deep}]", []) is read_container(f"[{deep}]") is None


def test_numbers_beyond_doubles_keep_their_digits() -> None:
    for text in ('{"a": 1e999}', "[-2.50E+400]"):
        whole = read_container(text)
        assert whole is not None
        assert read(text, []) == whole.text == text


def test_values_that_clients_cannot_read_are_no_json() -> None:
    for text in ("[NaN]", "[-Infinity]"):
        assert read(text, []) is read_container(text) is None
    whole = read_container('["\\ud800"]')
    assert whole is not None
    assert read('["\\ud800"]', []) == whole.text == '["\ufffd"]'
