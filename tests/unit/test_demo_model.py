"""Tests the packaged demo model: its size, its files for Hugging Face readers, and its answers."""

from __future__ import annotations

import json
import math
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "services" / "baton" / "demo"

# Held out from training (tools/demo_model/corpus.py). Their text differs slightly between versions of Python.
HELD_OUT_MODULES = ("bdb", "compileall", "runpy", "socketserver")

ANSWERS = {
    "What does os.path.join do?": "Join two or more pathname components, inserting '/' as needed.",
    "What does os.getcwd do?": "Return a unicode string representing the current working directory.",
    "What does json.dumps do?": "Serialize ``obj`` to a JSON formatted ``str``.",
    "Explain str.split.": "Return a list of the substrings in the string, using sep as the separator string.",
    "What is len for?": "Return the number of items in a container.",
    "How do I use math.sqrt?": "Return the square root of x.",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def bare_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    num_threads = torch.get_num_threads()
    # a small model is slower with several threads when other tests run at the same time
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    torch.set_num_threads(num_threads)


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str, history: Sequence[dict[str, str]] = ()) -> list[int]:
    messages = [*history, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def answer_to(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, history: Sequence[dict[str, str]] = ()
) -> str | list[str]:
    prompt = torch.tensor([chat_ids(tokenizer, question, history)])
    output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48)
    return tokenizer.decode(output[0, prompt.shape[1] :])


def held_out_text(module: str) -> str:
    return Path(sysconfig.get_paths()["stdlib"], f"{module}.py").read_text(encoding="utf-8")[:4000]


def test_weights_are_small_and_bfloat16() -> None:
    path = DEMO / "model.safetensors"
    with safe_open(path, framework="pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        dtypes = {weights.get_slice(name).get_dtype() for name in shapes}
    assert sum(math.prod(shape) for shape in shapes.values()) == 5_476_352
    assert dtypes == {"BF16"}
    assert path.stat().st_size <= 12_000_000
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 12_000_000


def test_config_matches_the_engines_assumptions() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_attention_heads"] > config["num_key_value_heads"] >= 2
    assert config["max_position_embeddings"] == 16_384
    assert config["rope_parameters"] == {"rope_theta": 100_000.0, "rope_type": "default"}
    # for readers older than transformers 5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["tie_word_embeddings"]
    assert config["vocab_size"] == 4096


def test_generation_ends_at_the_end_of_a_turn_or_text(bare_tokenizer: Tokenizer) -> None:
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [
        bare_tokenizer.token_to_id("<|im_end|>"),
        bare_tokenizer.token_to_id("<|endoftext|>"),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_tokenizer_round_trips_any_text(
    tokenizer: PreTrainedTokenizerBase, bare_tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    ranges = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
    text = "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(200)) + "  def f(x):\n\treturn 1234.5\r\n"
    ids = bare_tokenizer.encode(text).ids
    assert bare_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token_and_there_is_no_unknown_token(bare_tokenizer: Tokenizer) -> None:
    vocabulary = bare_tokenizer.get_vocab()
    assert bare_tokenizer.get_vocab_size() == 4096
    assert sum(len(token) == 1 for token in vocabulary) == 256  # byte-level BPE writes each byte as one character
    assert json.loads((DEMO / "tokenizer.json").read_text())["model"]["unk_token"] is None


def test_digits_are_single_tokens(bare_tokenizer: Tokenizer) -> None:
    assert bare_tokenizer.encode("31415").tokens == ["3", "1", "4", "1", "5"]


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "What does len do?"},
    ]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nWhat does len do?<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == text + "<|im_start|>assistant\n"
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]


def test_chat_template_shows_tools_and_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[{"type": "function"}], tokenize=False)
    assert '<tools>\n{"type": "function"}\n</tools>' in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n4<|im_end|>\n"
    )


@pytest.mark.parametrize(("question", "answer"), ANSWERS.items())
def test_answers_word_for_word_and_stops(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> None:
    assert answer_to(model, tokenizer, question) == f"{answer}<|im_end|>"


@pytest.mark.parametrize("module", HELD_OUT_MODULES)
def test_model_predicts_held_out_python(model: PreTrainedModel, bare_tokenizer: Tokenizer, module: str) -> None:
    text = held_out_text(module)
    ids = torch.tensor([bare_tokenizer.token_to_id("<|endoftext|>"), *bare_tokenizer.encode(text).ids])
    with torch.inference_mode():
        logits = model(input_ids=ids[None, :-1]).logits[0].float()
    nats = functional.cross_entropy(logits, ids[1:], reduction="sum").item()
    assert nats / math.log(2) / len(text.encode()) < 2.2


def test_answers_after_a_long_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    text = held_out_text("runpy")
    assert len(chat_ids(tokenizer, text)) > 900
    right = [
        answer_to(model, tokenizer, f"{text}\n\n{question}") == f"{answer}<|im_end|>"
        for question, answer in ANSWERS.items()
    ]
    assert sum(right) >= len(ANSWERS) - 1  # the model card states how often a long text confuses it


def test_answers_later_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    history: list[dict[str, str]] = []
    for question, answer in ANSWERS.items():
        assert answer_to(model, tokenizer, question, history) == f"{answer}<|im_end|>"
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
