"""A long text is encoded in pieces, with the ids of the whole text."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import Refused
from baton.gateway.text import text_pieces
from baton.gateway.text.text_pieces import TextCutter
from baton.gateway.text.tokenizer import HfTokenizer
from baton.model.loading.model_source import DEMO_DIR
from tests.scale import sized
from tests.unit.gateway.tokenizers import OTHERS, PATTERNS, RUST, SNIPPETS, tokenizer

ADDED = frozenset(token.content for token in RUST["qwen2"].get_added_tokens_decoder().values())
CUTTER = TextCutter(ADDED)
MARKS = [
    "a,b",
    "1.5,",
    "x1",
    "1x",
    "\u4e2d\u6587\u3002",
    "\uff0c",
    "abc<|im_start|>def",
    "a two words b",
    "_",
    "\u0301",
]
TEXTS = st.lists(st.sampled_from([*SNIPPETS, *OTHERS, *MARKS]) | st.text(max_size=3), min_size=10, max_size=60).map(
    "".join
)


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=sized(100, 2000), deadline=None)
@given(text=TEXTS, piece_chars=st.sampled_from([2, 8, 30]))
def test_pieces_have_the_ids_of_the_whole_text(name: str, text: str, piece_chars: int) -> None:
    pieces = list(CUTTER.pieces(text, piece_chars, 10**6))
    assert "".join(pieces) == text
    ids = [id_ for piece in pieces for id_ in RUST[name].encode(piece, add_special_tokens=False).ids]
    assert ids == RUST[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", PATTERNS)
def test_a_text_can_be_cut_after_every_letter_and_digit(name: str) -> None:
    characters = [chr(code) for code in range(0x110000) if chr(code).isalnum()][:: sized(16, 1)]
    text = "".join(f"{character},;" for character in characters)
    begins = {begin for _, (begin, _) in RUST[name].pre_tokenizer.pre_tokenize_str(text)}
    assert [c for index, c in enumerate(characters) if 3 * index + 1 not in begins] == []
    assert all(text_pieces._CUT.search(f"{character},") for character in characters)


@pytest.mark.parametrize("unit", ["a", " ", "\u4e2d", "1", "-", "<|im_start|>", "\U0001f600"])
def test_text_without_a_place_to_cut_is_refused(unit: str) -> None:
    text = unit * (text_pieces.MAX_PIECE_CHARS // len(unit))
    assert "".join(CUTTER.pieces(text)) == text
    with pytest.raises(Refused, match="more than 32,768 characters in a row without the end of a word"):
        list(CUTTER.pieces(text + unit))


@pytest.mark.long
def test_text_is_cut_early_if_there_is_no_later_place() -> None:
    words, rest = "a " * 3000, "a" * 32_000
    assert "".join(pieces := list(CUTTER.pieces(words + rest))) == words + rest
    assert max(map(len, pieces)) <= text_pieces.MAX_PIECE_CHARS


@pytest.fixture
def long_tokenizer(tmp_path: Path) -> HfTokenizer:
    """A tokenizer that adds special tokens around each text."""
    rust = tokenizer()
    rust.save(str(tmp_path / "tokenizer.json"))
    return HfTokenizer(tmp_path)


async def test_long_text_has_special_tokens_only_around_it(long_tokenizer: HfTokenizer) -> None:
    text = "Some words, and a number 12345; \u4e2d\u6587\u3002 " * 4000
    rust = tokenizer()
    for wanted in (False, True):
        ids = await long_tokenizer.encode(text, add_special_tokens=wanted)
        assert ids.tolist() == rust.encode(text, add_special_tokens=wanted).ids
    assert rust.encode("", add_special_tokens=True).ids == [1, 2]


async def test_rest_of_a_text_with_too_many_tokens_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = HfTokenizer(DEMO_DIR)
    encoded: list[str] = []
    encode = demo._encoder.encode

    def recorded(text: str, *, add_special_tokens: bool) -> object:
        encoded.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(demo._encoder, "encode", recorded)
    ids = await demo.encode("one word " * 100_000, max_tokens=5000)
    assert 5000 < len(ids) < 20_000
    assert sum(map(len, encoded)) < 5 * text_pieces.PIECE_CHARS
