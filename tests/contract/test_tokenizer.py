"""Contract of `Tokenizer`: text round trips, whole characters, and U+FFFD for ids without text."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from baton.core.errors import ModelError, Refused
from baton.gateway.text import chat_template
from baton.gateway.text.chat_prompt import ChatPrompt
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.detokenizer import REPLACEMENT
from baton.gateway.text.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer, special_tokens_around
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.process import loop_time
from tests.scale import sized

pytestmark = pytest.mark.contract

TEXTS = [
    "The quick brown fox.",
    " leading and trailing ",
    "line\nbreaks\r\n\ttabs",
    "def f(x):\n    return x  # comment",
    "ünïcödé – „quotes“ … € 中文字符 日本語 한국어 العربية",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 and \u0301combining",
    "x" * 300,
    "0123456789 3.14159",
]


ID_WITHOUT_TEXT = 10**6
"""An id for which no tokenizer here has a text."""


def write_model(directory: Path, tokenizer: RustTokenizer) -> Path:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": tokenizer.get_vocab_size() + 3, "max_position_embeddings": 77})
    )
    template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": {"content": "</s>"}})
    )
    return directory


def llama_like(directory: Path) -> Path:
    """Return a tokenizer like Llama 2's: spaces are ▁, the first one is stripped, with byte fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    characters = "\u2581" + "abcdefghijklmnopqrstuvwxyzT.:[]"
    vocab |= {letter: len(vocab) + n for n, letter in enumerate(characters)}
    merges = [("\u2581", "q"), ("t", "h"), ("o", "x")]
    vocab |= {"".join(pair): len(vocab) + n for n, pair in enumerate(merges)}
    tokenizer = RustTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return write_model(directory, tokenizer)


def byte_level(directory: Path) -> Path:
    """Return a tokenizer like GPT-2's, trained on a few words."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:4], trainer)
    tokenizer.add_tokens(["«added»"])
    return write_model(directory, tokenizer)


TOKENIZERS: dict[str, Callable[[Path], Tokenizer]] = {
    "bytes": lambda _: ByteTokenizer(),
    "demo": lambda _: HfTokenizer(DEMO_DIR),
    "byte-level": lambda path: HfTokenizer(byte_level(path / "model")),
    "llama-like": lambda path: HfTokenizer(llama_like(path / "model")),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tokenizer]:
    made = TOKENIZERS[request.param](tmp_path)
    yield made
    made.close()


async def test_text_round_trips(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = await tokenizer.encode(text, add_special_tokens=False)
        assert ids.typecode == "I"
        assert max(ids) < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text
        assert len(ids) >= tokenizer.min_tokens_of(len(text.encode()))


async def test_long_text_is_encoded_like_short_text(tokenizer: Tokenizer) -> None:
    text = "the quick fox. " * 3000
    ids = await tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) >= tokenizer.min_tokens_of(len(text))


async def test_streamed_text_equals_the_decoded_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = await tokenizer.encode(text, add_special_tokens=False)
        stream = tokenizer.detokenizer()
        pieces = [stream.put(token_id) for token_id in ids]
        assert "".join(pieces) == text
        assert stream.flush() == ""
        assert not any(REPLACEMENT in piece for piece in pieces)


async def test_streamed_text_of_random_ids_equals_the_decoded_text(tokenizer: Tokenizer) -> None:
    """Most of the random ids are parts of characters. Special tokens are skipped or kept."""
    rng = Random(5)
    for _ in range(sized(200, 5000)):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 30))]
        for skip in (True, False):
            stream = tokenizer.detokenizer(skip_special_tokens=skip)
            streamed = "".join(map(stream.put, ids)) + stream.flush()
            assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)
            streamed.encode()


async def test_each_id_without_text_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert stream.put(ID_WITHOUT_TEXT) + stream.put(ID_WITHOUT_TEXT) + stream.flush() == REPLACEMENT * 2
    assert tokenizer.token_bytes(ID_WITHOUT_TEXT) == REPLACEMENT.encode()


async def test_text_continues_after_an_id_without_text(tokenizer: Tokenizer) -> None:
    ids = list(await tokenizer.encode("the fox", add_special_tokens=False))
    assert tokenizer.decode([*ids, ID_WITHOUT_TEXT, *ids]) == f"the fox{REPLACEMENT}the fox"


async def test_id_beyond_the_tokenizer_vocabulary_becomes_a_replacement_character(tmp_path: Path) -> None:
    padded = HfTokenizer(byte_level(tmp_path / "model"))
    last = padded.vocab_size - 1
    assert padded.decode([last]) == REPLACEMENT
    assert padded.max_model_len == 77
    padded.close()


async def test_stream_continues_the_text_of_the_prompt(tokenizer: Tokenizer) -> None:
    prompt = list(await tokenizer.encode("the fox.", add_special_tokens=False))
    whole = list(await tokenizer.encode("the fox. and more", add_special_tokens=False))
    assert whole[: len(prompt)] == prompt, "none of these tokenizers merges tokens across the end of the prompt"
    stream = tokenizer.detokenizer(prompt=whole[: len(prompt)])
    assert "".join(map(stream.put, whole[len(prompt) :])) + stream.flush() == " and more"


async def test_chat_template_is_applied(tokenizer: Tokenizer) -> None:
    ids = await tokenizer.encode(
        await tokenizer.chat_text(ChatPrompt(messages=[{"role": "user", "content": "hello fox"}])),
        add_special_tokens=False,
    )
    text = tokenizer.decode(ids)
    assert "hello fox" in text
    assert text.index("user") < text.index("hello fox") < text.index("assistant")


async def test_token_bytes_of_all_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = await tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip(" ") == text.strip(" ")


async def test_byte_level_decoding_equals_that_of_the_library(tmp_path: Path) -> None:
    """Compare the byte table with the library's decoder, for ids that the library can decode."""
    for directory in (DEMO_DIR, byte_level(tmp_path / "model")):
        own, library = HfTokenizer(directory), RustTokenizer.from_file(str(directory / "tokenizer.json"))
        rng = Random(1)
        for _ in range(300):
            ids = [rng.randrange(library.get_vocab_size()) for _ in range(rng.randrange(1, 40))]
            for skip in (True, False):
                assert own.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)
        own.close()


async def test_special_tokens_are_skipped_only_on_request() -> None:
    demo = HfTokenizer(DEMO_DIR)
    ids = [*await demo.encode("hi", add_special_tokens=False), 2]
    assert demo.decode(ids, skip_special_tokens=True) == "hi"
    assert demo.decode(ids) == "hi<|im_end|>"
    demo.close()


async def test_model_without_a_template_rejects_chats(tmp_path: Path) -> None:
    directory = byte_level(tmp_path / "model")
    (directory / "tokenizer_config.json").unlink()
    tokenizer = HfTokenizer(directory)
    with pytest.raises(Refused, match="no chat template"):
        await tokenizer.chat_text(ChatPrompt(messages=[{"role": "user", "content": "x"}]))
    tokenizer.close()


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content }}", "hi" * loop_time.TEMPLATE_CHARACTERS),
        ("{% for i in range(20000) %}{{ messages[0].content }}{% endfor %}", "hi"),
    ],
    ids=["long messages", "slow template"],
)
async def test_expensive_chat_is_rendered_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, content: str
) -> None:
    directory = byte_level(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(template)
    rendered_in: list[threading.Thread] = []
    render = ChatTemplate.render

    def recorded(self: ChatTemplate, prompt: ChatPrompt, clock: Callable[[], float]) -> str:
        rendered_in.append(threading.current_thread())
        return render(self, prompt, clock)

    monkeypatch.setattr(ChatTemplate, "render", recorded)
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 60.0)  # for a busy machine
    tokenizer = HfTokenizer(directory)
    prompt = ChatPrompt(messages=[{"role": "user", "content": content}], num_characters=len(content))
    assert (await tokenizer.chat_text(prompt)).startswith(content)
    (thread,) = rendered_in
    assert thread is not threading.main_thread()
    tokenizer.close()


def without_letters(directory: Path, single: str) -> Path:
    """Return a byte-level tokenizer of a dot and a space. single: the template of its special tokens."""
    tokenizer = RustTokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, ".": 2, "\u0120": 3}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return write_model(directory, tokenizer)


async def test_special_tokens_are_found_although_the_vocabulary_has_no_letter(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(without_letters(tmp_path / "model", "<s> $A </s>"))
    assert list(await tokenizer.encode(". .")) == [0, 2, 3, 2, 1]
    long = list(await tokenizer.encode(". " * 10_000))
    assert (long[:2], long[-2:], len(long)) == ([0, 2], [3, 1], 20_002)
    tokenizer.close()


def test_tokens_that_special_tokens_replace_are_refused_by_name() -> None:
    class Replaces:
        def encode(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
            return SimpleNamespace(ids=[0, 1] if add_special_tokens else [2])

    with pytest.raises(ModelError, match=r"encodes 'a' as .* with special tokens"):
        special_tokens_around(cast(RustTokenizer, Replaces()))
