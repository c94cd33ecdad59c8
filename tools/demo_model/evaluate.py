"""Measures the demo model: bits per byte on held-out modules, and the share of facts it answers word for
word.

python tools/demo_model/evaluate.py --model services/baton/demo [--limit N]

Facts have weights: 4 for the names in `corpus.MOST_ASKED`, 2 for those of common modules, 1 for the others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpus
import torch
from tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

WINDOW_TOKENS = 1024
MAX_ANSWER_TOKENS = 96


@torch.inference_mode()
def bits_per_byte(model: torch.nn.Module, tokenizer: Tokenizer, documents: Sequence[corpus.Document]) -> float:
    """Return the mean code length of the documents' bytes, in windows of 1,024 tokens without overlap."""
    nats, num_bytes = 0.0, 0
    for document in documents:
        ids = [END_OF_TEXT_ID, *tokenizer.encode(document.text).ids]
        num_bytes += len(document.text.encode())
        for start in range(0, len(ids) - 1, WINDOW_TOKENS):
            window = torch.tensor(ids[start : start + WINDOW_TOKENS + 1])
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            nats += functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / math.log(2) / num_bytes


@torch.inference_mode()
def recalled(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    answers: Sequence[str],
    batch_size: int = 64,
) -> list[bool]:
    """Return for each question if it is answered greedily with exactly the given answer and the end of turn.

    Each question is a chat of its own. One forward pass per answer suffices: greedy decoding gives the answer
    if and only if each of its tokens is the most likely after those before it. Rounding differs slightly
    between that pass and decoding, so near ties may differ.
    """
    verdicts = []
    for start in range(0, len(questions), batch_size):
        pairs = list(zip(questions[start : start + batch_size], answers[start : start + batch_size], strict=True))
        prompts = [chat_prompt(tokenizer, question) for question, _ in pairs]
        wanted = [[*tokenizer.encode(answer, add_special_tokens=False), END_OF_TURN_ID] for _, answer in pairs]
        longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, wanted, strict=True))
        ids = torch.full((len(pairs), longest), END_OF_TEXT_ID)
        for row, prompt, answer in zip(ids, prompts, wanted, strict=True):
            row[: len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        likeliest = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        for row, prompt, answer in zip(likeliest.tolist(), prompts, wanted, strict=True):
            verdicts.append(row[len(prompt) - 1 : len(prompt) - 1 + len(answer)] == answer)
    return verdicts


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the token ids of a chat with one question, up to the start of the answer."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(str(text), add_special_tokens=False)


@torch.inference_mode()
def generated(model: Any, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Return the greedy answer to a question, with the special token at its end."""
    prompt = torch.tensor([chat_prompt(tokenizer, question)])
    output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_ANSWER_TOKENS)
    return str(tokenizer.decode(output[0, prompt.shape[1] :]))


def main() -> None:
    """Print the figures of the model card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="number of facts to ask about, highest weight first; default: all")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bare_tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    print(
        f"held-out bits per byte: {bits_per_byte(model, bare_tokenizer, corpus.held_out_documents()):.3f}", flush=True
    )

    missed: list[corpus.Fact] = []
    facts = sorted(corpus.facts(), key=lambda fact: -fact.weight)[: args.limit]
    print(f"{'answered word for word':40}", "     all weight 4 weight 2 weight 1")
    for wording in (*corpus.QUESTIONS, *corpus.RARE_QUESTIONS):
        right = recalled(
            model, tokenizer, [wording.format(name=fact.name) for fact in facts], [fact.answer for fact in facts]
        )
        by_weight = {
            weight: [ok for ok, fact in zip(right, facts, strict=True) if fact.weight == weight] for weight in (4, 2, 1)
        }
        rates = [f"{sum(oks) / max(1, len(oks)):8.1%}" for oks in (right, *by_weight.values())]
        print(f"{wording:40}", *rates, flush=True)
        if wording == corpus.QUESTIONS[0]:
            missed = [fact for ok, fact in zip(right, facts, strict=True) if not ok]
    for fact in missed[:40]:
        question = corpus.QUESTIONS[0].format(name=fact.name)
        print(f"{question} {generated(model, tokenizer, question)!r}, not {fact.answer!r}", flush=True)


if __name__ == "__main__":
    main()
