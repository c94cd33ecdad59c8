"""Trains the demo model: a Qwen3-style causal LM of 5.5M parameters that learns docstrings by heart.

nice -n 10 python tools/demo_model/train.py --out services/baton/demo

The weights in the package were trained with the defaults. The data and their order depend only on the seed
and the Python version. The arithmetic also depends on the machine, so another run gives similar but not equal
weights. `--resume` continues a stopped run from its last checkpoint. Steps before the fast cool-down do not
depend on `--steps`, so a run that is too slow can be resumed with fewer steps.

The learning rate has a warm-up, a constant phase, a slow linear cool-down with more chats, and a fast one to
zero. Muon (Jordan et al. 2024) trains the matrices, because it learns rare associations with fewer
repetitions than AdamW. AdamW trains the embedding and the norms.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
from evaluate import bits_per_byte
from tokenizer import END_OF_TEXT_ID, END_OF_TURN, END_OF_TURN_ID, MAX_POSITION_EMBEDDINGS, START_OF_TURN, VOCAB_SIZE
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

STEP_TOKENS = 8192
WARMUP_STEPS = 30
SLOW_COOLDOWN_START, SLOW_COOLDOWN_STEPS = 480, 320
FAST_COOLDOWN_STEPS = 110
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.05
MAX_GRAD_NORM = 1.0

TEXT_WEIGHT, QUESTION_WEIGHT, ANSWER_WEIGHT = 0.5, 0.1, 1.0
CHAT_SHARE, CHAT_SHARE_COOLDOWN = 0.55, 0.85

Row = tuple[list[int], list[float]]  # token ids, and the weight of each in the loss


def model_config() -> Qwen3Config:
    """Return a configuration with 5,476,352 parameters.

    Two query heads share each of two KV heads, and the output matrix is the embedding.
    """
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=END_OF_TURN_ID,
        pad_token_id=END_OF_TEXT_ID,
    )


class Rows:
    """Generates packed rows of text, of chat and of both, without end.

    All texts and facts are used once per epoch, in a new order each time.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._facts = corpus.facts()
        self._documents = [tokenizer.encode(document.text).ids for document in corpus.training_documents()]
        self._text_left: list[int] = []
        self._fact_stream = self._facts_forever()
        self._cut_conversation: Row | None = None

    def text(self, length: int) -> Row:
        """Return the next `length` tokens of all text."""
        while len(self._text_left) < length:
            for index in self._rng.sample(range(len(self._documents)), len(self._documents)):
                self._text_left += [*self._documents[index], END_OF_TEXT_ID]
        ids, self._text_left = self._text_left[:length], self._text_left[length:]
        return ids, [TEXT_WEIGHT] * length

    def chat(self, length: int) -> Row:
        """Return conversations of `length` tokens. The one that is cut off starts the next row."""
        ids, weights = self._cut_conversation or self._conversation()
        self._cut_conversation = None
        while len(ids) < length:
            more_ids, more_weights = self._conversation()
            if len(ids) + 1 + len(more_ids) > length:
                self._cut_conversation = more_ids, more_weights
            ids, weights = [*ids, END_OF_TEXT_ID, *more_ids], [*weights, ANSWER_WEIGHT, *more_weights]
        return ids[:length], weights[:length]

    def mixed(self, length: int) -> Row:
        """Return passages of text, each before a conversation or inside its question."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            passage, passage_weights = self.text(self._rng.randint(length // 8, length // 3))
            if self._rng.random() < 0.5:
                more, more_weights = self._conversation(passage)
            else:
                conversation, conversation_weights = self.chat(self._rng.randint(64, 256))
                more = [*passage, END_OF_TEXT_ID, *conversation]
                more_weights = [*passage_weights, QUESTION_WEIGHT, *conversation_weights]
            ids += [*more, END_OF_TEXT_ID]
            weights += [*more_weights, QUESTION_WEIGHT]
        return ids[:length], weights[:length]

    def _facts_forever(self) -> Iterator[corpus.Fact]:
        deck = [fact for fact in self._facts for _ in range(fact.weight)]
        while True:
            yield from self._rng.sample(deck, len(deck))

    def _conversation(self, passage: list[int] | None = None) -> Row:
        """Return one to three turns, some after a system prompt; `passage` is put before the first
        question."""
        ids: list[int] = []
        weights: list[float] = []

        def add_message(role: str, content: list[int], weight: float) -> None:
            opening = self._tokenizer.encode(f"{START_OF_TURN}{role}\n").ids
            ids.extend([*opening, *content, *self._tokenizer.encode(f"{END_OF_TURN}\n").ids])
            weights.extend([QUESTION_WEIGHT] * len(opening) + [weight] * (len(content) + 1) + [QUESTION_WEIGHT])

        if self._rng.random() < 0.15:
            add_message("system", self._tokenizer.encode(self._rng.choice(corpus.SYSTEM_PROMPTS)).ids, QUESTION_WEIGHT)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            turn = (
                corpus.greet(self._rng) if self._rng.random() < 0.02 else corpus.ask(next(self._fact_stream), self._rng)
            )
            question = self._tokenizer.encode(turn.question).ids
            if passage is not None:
                question, passage = [*passage, *self._tokenizer.encode(f"\n\n{turn.question}").ids], None
            add_message("user", question, QUESTION_WEIGHT)
            add_message("assistant", self._tokenizer.encode(turn.answer).ids, ANSWER_WEIGHT)
        return ids, weights


def batch(rows: Rows, step: int, is_cooldown: bool) -> tuple[Tensor, Tensor]:
    """Return token ids and weights, [num_rows, length + 1].

    Rows have 512 tokens, in every 8th step 2,048 and in every 40th 8,192.
    """
    length = 8192 if step % 40 == 39 else 2048 if step % 8 == 7 else 512
    num_rows = STEP_TOKENS // length
    if length > 512:
        made = [rows.mixed(length + 1) for _ in range(num_rows)]
    else:
        num_chats = round(num_rows * (CHAT_SHARE_COOLDOWN if is_cooldown else CHAT_SHARE))
        made = [rows.chat(length + 1) for _ in range(num_chats)]
        made += [rows.text(length + 1) for _ in range(num_rows - num_chats)]
    return torch.tensor([ids for ids, _ in made]), torch.tensor([weights for _, weights in made])


def learning_rate_scale(step: int, num_steps: int) -> float:
    """Return the fraction of the peak learning rate at a step."""
    slow = 1 - (step - SLOW_COOLDOWN_START) / SLOW_COOLDOWN_STEPS
    fast = (num_steps - step) / FAST_COOLDOWN_STEPS
    return min(1.0, (step + 1) / WARMUP_STEPS, slow, fast)


def train(args: argparse.Namespace) -> None:
    """Run the training; write checkpoints and, at the end, the bfloat16 model."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    rows = Rows(tokenizer, args.seed)
    model = Qwen3ForCausalLM(model_config())
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    first_step = 0
    if args.resume:
        saved = torch.load(args.checkpoint, weights_only=True)
        first_step = saved["step"]
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    forward = torch.compile(model, dynamic=False) if args.compile else model

    started_s = time.monotonic()
    log: list[tuple[float, float]] = []
    for step in range(args.steps):
        is_cooldown = step >= SLOW_COOLDOWN_START
        ids, weights = batch(rows, step, is_cooldown)
        if step < first_step:  # when resuming, only advance the data
            continue
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_scale(step, args.steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = forward(input_ids=ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        is_answer, is_text = weights == ANSWER_WEIGHT, weights == TEXT_WEIGHT
        log.append((losses[is_answer].mean().item(), losses[is_text].mean().item()))
        if step % 10 == 9 or step + 1 == args.steps:
            answer, text = (torch.tensor(column).nanmean().item() for column in zip(*log[-10:], strict=True))
            tokens_per_s = (step + 1 - first_step) * STEP_TOKENS / (time.monotonic() - started_s)
            print(
                f"step {step + 1} answer {answer:.3f} text {text:.3f} nats/token, {tokens_per_s:.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % args.checkpoint_steps == 0 or step + 1 == args.steps:
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizers": states}, args.checkpoint)
    print(f"trained {args.steps - first_step} steps in {time.monotonic() - started_s:.0f} s", flush=True)
    write(model.bfloat16(), args.out)
    print(f"held-out bits per byte: {bits_per_byte(model, tokenizer, corpus.held_out_documents()):.3f}", flush=True)


def write(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors.

    `rope_theta` is also written at top level, where readers older than transformers 5 expect it.
    """
    model.generation_config = GenerationConfig(
        eos_token_id=[END_OF_TURN_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID, do_sample=False
    )
    model.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory with tokenizer.json; the model is written there"
    )
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--seed", type=int, default=corpus.SEED)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--checkpoint", type=Path, default=Path("demo_model.pt"))
    parser.add_argument("--checkpoint-steps", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
