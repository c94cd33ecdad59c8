"""Incremental detokenizers: any split of the bytes, and bounded memory."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.text.detokenizer import REPLACEMENT, BytesDetokenizer, WindowDetokenizer


@given(st.lists(st.binary(max_size=6), max_size=20))
def test_text_does_not_depend_on_how_bytes_are_split_into_tokens(pieces: list[bytes]) -> None:
    stream = BytesDetokenizer(pieces)
    text = "".join(map(stream.put, range(len(pieces)))) + stream.flush()
    assert text == b"".join(pieces).decode(errors="replace")


@given(st.text(max_size=20), st.integers(1, 4))
def test_character_is_returned_with_its_last_byte(text: str, size: int) -> None:
    data = text.encode()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    stream = BytesDetokenizer(pieces)
    shown = ""
    for index in range(len(pieces)):
        shown += stream.put(index)
        assert shown == b"".join(pieces[: index + 1]).decode(errors="ignore")


def test_id_without_text_ends_an_incomplete_character() -> None:
    stream = BytesDetokenizer([b"\xe2\x82", None, b"a"])
    assert [stream.put(token_id) for token_id in (0, 1, 2, 7)] == ["", REPLACEMENT * 2, "a", REPLACEMENT]
    assert stream.flush() == ""


def decode_with_stripped_space(ids: list[int]) -> str:
    """Decode ids as bytes, and strip a leading space as Llama's tokenizer does."""
    text = bytes(ids).decode(errors="replace")
    return text[1:] if text.startswith(" ") else text


def window(prompt: bytes = b"") -> WindowDetokenizer:
    return WindowDetokenizer(
        lambda ids: decode_with_stripped_space(list(ids)), lambda token_id: token_id < 256, list(prompt)
    )


def test_window_keeps_a_space_that_is_stripped_only_at_the_beginning() -> None:
    stream = window(b"the")
    assert "".join(map(stream.put, b" fox")) == " fox"
    alone = window()
    assert "".join(map(alone.put, b" fox")) == "fox"


def test_window_waits_for_complete_characters_up_to_a_limit() -> None:
    stream = window(b"x")
    text = "a\u20ac\U0001f600b"
    pieces = [stream.put(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)
    broken = window(b"x")
    pieces = [broken.put(0xE2) for _ in range(50)]
    assert "".join(pieces).count(REPLACEMENT) >= 40
    assert "".join(pieces) + broken.flush() == REPLACEMENT * 50


def test_window_drops_returned_tokens() -> None:
    rng = Random(2)
    stream = window(b"x")
    text = "".join(rng.choice("ab \u20ac") for _ in range(5000))
    assert "".join(map(stream.put, text.encode())) == text
    assert len(stream._ids) < 100


def test_tokens_without_text_do_not_accumulate() -> None:
    stream = WindowDetokenizer(lambda ids: "".join("" if i == 0 else chr(i) for i in ids), lambda _: True, [])
    assert "".join(stream.put(0) for _ in range(1000)) == ""
    assert len(stream._ids) < 100
    assert stream.put(97) + stream.flush() == "a"
