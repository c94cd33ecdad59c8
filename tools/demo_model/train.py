"""Train the demo model: a Qwen3-style causal LM of 5.5M parameters that knows the standard library's
docstrings by heart.

nice -n 10 python tools/demo_model/train.py --out services/baton/demo

The defaults made the weights in the package. The data and their order depend on the seed and the Python
version alone; the arithmetic also depends on the machine, so another run ends close by and not bit-equal. A
run that was stopped goes on from its last checkpoint with `--resume`; steps before the fast cool-down are the
same whatever `--steps` says, so a run that turns out too slow can be resumed with fewer.

Learning rate: warm-up, constant, a slow linear cool-down with more chats, a fast one to zero. Matrices are
trained by Muon (Jordan et al. 2024), which learns rare associations with fewer repetitions than AdamW; the
embedding and the norms by AdamW.
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

Row = tuple[list[int], list[float]]  # token ids, and the weight of the loss at each


def model_config() -> Qwen3Config:
    """5,476,352 parameters: two query heads share each of two KV heads; the output matrix is the
    embedding."""
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
    """Endless packed rows of text, of chat and of both; texts and facts each pass once an epoch, in a new
    order each time."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._facts = corpus.facts()
        self._documents = [tokenizer.encode(document.text).ids for document in corpus.training_documents()]
        self._text_left: list[int] = []
        self._fact_stream = self._facts_forever()
        self._cut_conversation: Row | None = None

    def text(self, length: int) -> Row:
        """The next `length` tokens of all text."""
        while len(self._text_left) < length:
            for index in self._rng.sample(range(len(self._documents)), len(self._documents)):
                self._text_left += [*self._documents[index], END_OF_TEXT_ID]
        ids, self._text_left = self._text_left[:length], self._text_left[length:]
        return ids, [TEXT_WEIGHT] * length

    def chat(self, length: int) -> Row:
        """Conversations up to `length` tokens; the one that is cut at the end starts the next row as well."""
        ids, weights = self._cut_conversation or self._conversation()
        self._cut_conversation = None
        while len(ids) < length:
            more_ids, more_weights = self._conversation()
            if len(ids) + 1 + len(more_ids) > length:
                self._cut_conversation = more_ids, more_weights
            ids, weights = [*ids, END_OF_TEXT_ID, *more_ids], [*weights, ANSWER_WEIGHT, *more_weights]
        return ids[:length], weights[:length]

    def mixed(self, length: int) -> Row:
        """Stretches of text, each before a conversation or inside its question."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            stretch, stretch_weights = self.text(self._rng.randint(length // 8, length // 3))
            if self._rng.random() < 0.5:
                more, more_weights = self._conversation(stretch)
            else:
                conversation, conversation_weights = self.chat(self._rng.randint(64, 256))
                more = [*stretch, END_OF_TEXT_ID, *conversation]
                more_weights = [*stretch_weights, QUESTION_WEIGHT, *conversation_weights]
            ids += [*more, END_OF_TEXT_ID]
            weights += [*more_weights, QUESTION_WEIGHT]
        return ids[:length], weights[:length]

    def _facts_forever(self) -> Iterator[corpus.Fact]:
        deck = [fact for fact in self._facts for _ in range(fact.weight)]
        while True:
            yield from self._rng.sample(deck, len(deck))

    def _conversation(self, stretch: list[int] | None = None) -> Row:
        """One to three turns, some after a system prompt; `stretch` is put before the first question."""
        ids: list[int] = []
        weights: list[float] = []

        def say(role: str, content: list[int], weight: float) -> None:
            opening = self._tokenizer.encode(f"{START_OF_TURN}{role}\n").ids
            ids.extend([*opening, *content, *self._tokenizer.encode(f"{END_OF_TURN}\n").ids])
            weights.extend([QUESTION_WEIGHT] * len(opening) + [weight] * (len(content) + 1) + [QUESTION_WEIGHT])

        if self._rng.random() < 0.15:
            say("system", self._tokenizer.encode(self._rng.choice(corpus.SYSTEM_PROMPTS)).ids, QUESTION_WEIGHT)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            turn = (
                corpus.greet(self._rng) if self._rng.random() < 0.02 else corpus.ask(next(self._fact_stream), self._rng)
            )
            question = self._tokenizer.encode(turn.question).ids
            if stretch is not None:
                question, stretch = [*stretch, *self._tokenizer.encode(f"\n\n{turn.question}").ids], None
            say("user", question, QUESTION_WEIGHT)
            say("assistant", self._tokenizer.encode(turn.answer).ids, ANSWER_WEIGHT)
        return ids, weights


def batch(rows: Rows, step: int, is_cooldown: bool) -> tuple[Tensor, Tensor]:
    """Token ids and weights [num_rows, length + 1]: 512 long, every 8th step 2,048 and every 40th 8,192."""
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
    """Share of the peak learning rate at a step."""
    slow = 1 - (step - SLOW_COOLDOWN_START) / SLOW_COOLDOWN_STEPS
    fast = (num_steps - step) / FAST_COOLDOWN_STEPS
    return min(1.0, (step + 1) / WARMUP_STEPS, slow, fast)


def train(args: argparse.Namespace) -> None:
    """The whole run; writes a checkpoint now and then and the bfloat16 model at the end."""
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
        if step < first_step:  # resumed: the same data pass by
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
    """config.json, generation_config.json, model.safetensors.

    `rope_theta` is written beside `rope_parameters`, where readers older than transformers 5 look for it.
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
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder with tokenizer.json, where the model is written"
    )
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--seed", type=int, default=corpus.SEED)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--checkpoint", type=Path, default=Path("demo_model.pt"))
    parser.add_argument("--checkpoint-steps", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
