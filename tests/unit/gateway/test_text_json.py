"""Long texts are formatted as JSON in pieces, with the same result as whole."""

import asyncio
import json
import threading

import pytest

from baton.gateway.http.output import text_json
from baton.gateway.http.output.text_json import CHARS_PER_PIECE, format_long_text, format_text
from baton.runtime.process import loop_time
from tests.longest_call import longest_call_s


@pytest.mark.parametrize("unit", ["a", '"\\', "\n", "é", "😀", "a😀", "\ud83d", "\ud83d\ude00"])
@pytest.mark.parametrize("length", [0, 1, CHARS_PER_PIECE - 1, CHARS_PER_PIECE, 2 * CHARS_PER_PIECE + 1])
def test_pieces_are_the_same_as_the_whole(unit: str, length: int) -> None:
    text = (unit * length)[:length]
    assert b"".join(format_text(text)).decode() == json.dumps(text)


def test_long_text_lets_other_threads_run() -> None:
    text = "é" * 2**20
    longest_s = min(longest_call_s(format_text, text) for _ in range(5))  # other work may delay one of them
    assert longest_s < longest_call_s(json.dumps, text) / 4


async def test_only_a_long_text_is_formatted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(text_json, "format_text", lambda _: threads.append(threading.current_thread()))
    await asyncio.gather(
        format_long_text("a" * loop_time.JSON_CHARACTERS), format_long_text("a" * (loop_time.JSON_CHARACTERS + 1))
    )
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
