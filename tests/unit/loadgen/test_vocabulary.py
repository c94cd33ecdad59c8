"""Tokenizers: ordinary tokens, words that are one token each, and prompts made of words."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import Vocabulary
from loadgen.plan.vocabulary import encoder_of, load_tokenizer, vocabulary_of, vocabulary_of_size, words_of
from loadgen.plan.words import COMMON_WORDS, Words, text_of, warm_up_text
from tests.unit.loadgen.plans import chat_plan, plan, request

DEMO = Path(__file__).resolve().parents[3] / "services" / "baton" / "demo"


def train(path: Path, pre_tokenizer: object, specials: tuple[str, ...] = ("<unk>", "<s>", "</s>")) -> Tokenizer:
    """Return a tokenizer that knows the common words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer  # type: ignore[assignment]
    tokenizer.train_from_iterator(
        [" ".join(COMMON_WORDS.words)] * 3, trainers.BpeTrainer(vocab_size=900, special_tokens=list(specials))
    )
    tokenizer.save(str(path))
    return tokenizer


def test_ordinary_tokens_of_the_demo_model_are_found() -> None:
    assert vocabulary_of(DEMO) == vocabulary_of(DEMO / "tokenizer.json") == Vocabulary(low=3, high=4096)


def test_special_added_and_placeholder_tokens_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer = train(file, pre_tokenizers.ByteLevel(), ("<s>", "<unused0>", "[control_7]", "<|reserved_3|>"))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(file))
    vocabulary = vocabulary_of(tmp_path)
    assert vocabulary.low == 4
    assert vocabulary.high == tokenizer.get_vocab_size() - 2
    assert vocabulary.excluded == ()


def test_holes_and_placeholders_in_the_middle_are_excluded(tmp_path: Path) -> None:
    pieces = {"a": 0, "b": 1, "<unused1>": 2, "c": 3, "d": 6, "e": 7}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary_of(tmp_path) == Vocabulary(low=0, high=8, excluded=(2, 4, 5))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    assert vocabulary_of(tmp_path) == Vocabulary(low=0, high=7, excluded=(2, 4, 5))
    (tmp_path / "config.json").write_text("{")
    assert vocabulary_of(tmp_path).high == 8


def test_vocabulary_of_a_given_size_has_its_range() -> None:
    assert vocabulary_of_size(32_000) == Vocabulary(low=1000, high=32_000)
    assert vocabulary_of_size(500, 3) == Vocabulary(low=3, high=500)
    with pytest.raises(BadPlan, match="a vocabulary of 500 has fewer than two ids from 1000 on"):
        vocabulary_of_size(500)


def test_invalid_tokenizers_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match=r"tokenizer\.json: no such file; give a model's directory"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadPlan, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadPlan, match="this tokenizer has 1 ordinary tokens"):
        vocabulary_of(tmp_path)


@pytest.mark.parametrize(
    "pre_tokenizer", [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Metaspace()]
)
def test_text_of_words_has_the_planned_tokens(tmp_path: Path, pre_tokenizer: object) -> None:
    tokenizer = train(tmp_path / "tokenizer.json", pre_tokenizer)
    words = words_of(tmp_path)
    assert len(words.words) > 100
    planned = plan(*(request(i, (0, 50), (i + 1, 30 + i)) for i in range(50)))
    for r in planned.requests:
        assert len(tokenizer.encode(text_of(planned, r, {}, words)).ids) == planned.num_prompt_tokens(r)


def test_words_of_the_demo_model_are_found() -> None:
    tokenizer, words, rng = load_tokenizer(DEMO), words_of(DEMO), random.Random(1)
    for count in (1, 10, 1000):
        text = words.lead + " ".join(rng.choices(words.words, k=count))
        assert len(tokenizer.encode(text).ids) == count
    assert encoder_of(DEMO)("hello") == tokenizer.encode("hello").ids


def test_tokenizer_without_words_is_rejected(tmp_path: Path) -> None:
    train(tmp_path / "tokenizer.json", pre_tokenizers.Whitespace())
    with pytest.raises(BadPlan, match="only 0 words are one token each"):
        words_of(tmp_path)


def test_common_words_are_many_and_distinct() -> None:
    assert len(COMMON_WORDS.words) == len(set(COMMON_WORDS.words)) > 400
    assert all(word.isascii() and word.islower() and word.isalpha() for word in COMMON_WORDS.words)


def test_text_shares_what_tokens_share() -> None:
    planned = chat_plan()
    first, second, later = (text_of(planned, r, {0: " The answer. "}) for r in planned.requests)
    assert len(first.split(" ")) == 60
    assert first.split(" ")[:40] == second.split(" ")[:40]
    assert first.split(" ")[40] != second.split(" ")[40]
    assert later.startswith(f"{first} The answer. ")
    assert len(later.split(" ")) == 60 + 2 + 5


def test_warm_up_starts_with_a_reserved_word() -> None:
    planned = plan(*(request(i, (i, 3)) for i in range(1000)))
    warm_up = warm_up_text(planned, 0, 12)
    assert len(warm_up.split(" ")) == 12
    assert warm_up.split(" ")[0] not in {text_of(planned, r, {}).split(" ")[0] for r in planned.requests}
    assert warm_up != warm_up_text(planned, 1, 12)


def test_texts_are_unchanged_and_exact_tokens_rejected() -> None:
    planned = plan(request(0, "One\n", "Two"), request(1, [1, 2]))
    assert text_of(planned, planned.requests[0], {}) == "One\nTwo"
    with pytest.raises(BadPlan, match="exact token ids cannot be sent as text"):
        text_of(planned, planned.requests[1], {})
    with pytest.raises(KeyError):
        text_of(chat_plan(), chat_plan().requests[2], {}, Words(words=("a", "b", "c")))
