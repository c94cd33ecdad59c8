"""Stop strings across token boundaries."""

import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.text.stop_strings import StopMatcher, StopPatterns
from tests.cpu_time import CpuTime

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(StopPatterns(stops))
    shown = ""
    for piece in pieces:
        text, found = matcher.put(piece)
        shown += text
        if found:
            return shown, True
    return shown + matcher.flush(), False


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Find the first stop string by reading one character at a time."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=6))
def test_result_does_not_depend_on_how_text_is_split(text: str, stops: list[str], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert run(pieces, stops) == first_stop(text, stops)


@given(TEXT, STOPS)
def test_only_possible_stop_strings_are_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopPatterns(stops))
    shown = ""
    for end, character in enumerate(text, 1):
        new, found = matcher.put(character)
        shown += new
        if found:
            return
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = [text[at:end] for at in range(len(shown))]
        assert not any(stop.startswith(tail) for tail in longer for stop in stops)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    matcher = StopMatcher(StopPatterns(["ab"]))
    assert matcher.put("a") == ("", False)
    assert matcher.pass_through("b!") == "ab!"
    assert matcher.put("ab") == ("", True)


def test_stop_string_can_be_included_in_the_text() -> None:
    for pieces in (["xxSTOPyy"], ["xxS", "TO", "Py"], list("xxSTOPyy")):
        matcher = StopMatcher(StopPatterns(["STOP", "TOPx"], is_included=True))
        texts = [matcher.put(piece) for piece in pieces]
        end = next(i for i, (_, found) in enumerate(texts) if found)
        assert "".join(text for text, _ in texts[: end + 1]) == "xxSTOP"


def longest_stops() -> list[str]:
    """The largest legal stop strings: 16 of 1,024 characters, each almost periodic."""
    return ["a" * 1007 + chr(ord("b") + number) + "a" * 16 for number in range(16)]


def test_matchers_of_128_samples_share_memory_linear_in_the_stop_strings() -> None:
    stops = longest_stops()
    tracemalloc.start()
    try:
        patterns = StopPatterns(stops)
        matchers = [StopMatcher(patterns) for _ in range(128)]
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(matchers) == 128
    assert num_bytes < 256 * 1024


def test_cpu_time_of_a_character_does_not_grow_with_the_length_of_the_stop_strings() -> None:
    def cpu_s(stops: list[str]) -> float:
        matcher = StopMatcher(StopPatterns(stops))
        with CpuTime() as cpu:
            for _ in range(200):
                matcher.put("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac")
        return cpu.spent_s

    short = [stop[-20:] for stop in longest_stops()]
    assert min(cpu_s(longest_stops()) for _ in range(3)) < 5 * min(cpu_s(short) for _ in range(3))
