"""Measures TPOT with and without drafts, on answers that copy from their prompts and on others.

python -m bench draft_tokens --out DIR [--models qwen3-0.6b,tiny-42m] [--repeats 5] [--outputs 200]
[--batches 1,8] [--answers edit,random] [--model DIR] [--draft SHAPE] [--draft-right 0.7] [--json]

The engine runs in this process, without gateway. Weights are random, so answers are scripted: a step computes
everything as usual, and then the drawn tokens are replaced by those of the script. Each answer is

edit: the document of the prompt with every 20th token changed, on average.
extract: passages of 10 to 60 tokens of the document.
random: random tokens. Hardly any three of them recur, so there are no drafts.
zipf: few different tokens, drawn by Zipf's law, in prompt and answer. Three of them often recur, and go on
    otherwise: most drafts are wrong.

TPOT is the mean time per token after the first. All modes run on one executor, whose costs are measured
first. Each repeat goes through all cells in random order. In a cell `--speculate` off, ngram and auto follow
each other in random order, with the same texts and a new engine each, so recent answers do not help. DIR
keeps the figures of every finished repeat, apart for each choice of --answers, --outputs, --batches and
--draft. An interrupted run continues where it stopped. The table has medians, and the median of the repeats'
ratios with minimum and maximum.

--draft adds a draft model of a shape, with random weights and the vocabulary of the model that verifies. It
computes as usual, and then --draft-right of its tokens, drawn by chance, are those of the script and the
others wrong.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.core.kv.block_hash import TokenIds
from baton.engine.engine import Engine, EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.loop import EngineLoop
from baton.engine.speculation.draft_model import DraftModel
from baton.engine.speculation.modes import open_speculation
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import StepPlan
from baton.model.backends.backend_selection import choose_backend
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_shapes import shape_config
from baton.model.step.step_launch import LaunchedStep, StepLauncher
from baton.model.torch_executor import TorchExecutor
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.costs.measure_costs import measure_costs
from baton.worker.costs.step_cost_keeper import CostKeeper, work_of
from bench.scenarios.cluster.goodput import model_directory
from bench.support.created_model import created_model
from bench.support.engine.engine_prompts import FIRST_ID
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import THREADS, sequence_requests, vocabulary

MODES = ("off", "ngram", "auto")
DRAFT = "draft"
"""Mode with a draft model."""
TEXTS = ("edit", "extract", "random", "zipf")
ALL_TEXTS = ",".join(TEXTS)
ZIPF_TOKENS = 20
"""Different tokens of `zipf`."""
DOCUMENT_TOKENS = 400
BLOCK_SIZE_TOKENS = 16
NUM_BLOCKS = 1024


class Scripts:
    """The answer of each prompt, found by the prompt's first token, which is unique."""

    def __init__(self) -> None:
        self.answer_of: dict[int, Sequence[int]] = {}

    def token(self, history: TokenIds, num_prompt_tokens: int, position: int) -> int | None:
        """Return the token at a position; None for steps that are not of a scripted request."""
        answer = self.answer_of.get(history[0])
        index = position - num_prompt_tokens
        return None if answer is None or index >= len(answer) else answer[index]


class ScriptedLauncher(StepLauncher):
    """Replaces the tokens that steps have drawn by those of `scripts`. For a CPU: a GPU draws them later."""

    scripts = Scripts()

    def token(self, token: int) -> int:
        """Return what is drawn instead of a token of the script."""
        return token

    def launch(self, plan: StepPlan, after: LaunchedStep | None = None) -> LaunchedStep:
        launched = super().launch(plan, after)
        if launched.draws is not None:
            for (_, request), own in zip(launched.draws.row_requests, launched.draws.draws_of_row, strict=True):
                token = self.scripts.token(request.history, request.num_prompt_tokens, request.position)
                if token is not None:
                    launched.draws.found[own.start] = self.token(token)
        return launched


class ScriptedDrafts(ScriptedLauncher):
    """The launcher of a draft model, which is right by chance. `share`: of right tokens."""

    share = 0.0
    rng = random.Random(1)

    def token(self, token: int) -> int:
        return token if self.rng.random() < self.share else FIRST_ID


class ScriptedEngine:
    """An executor over one model, and a new engine for each measurement."""

    def __init__(self, directory: Path, draft: Path | None = None) -> None:
        """draft: directory of a draft model; None measures without one."""
        self._thread = compute_thread(THREADS)
        self._executor, self.vocab_size = self._thread.submit(self._open, directory, ScriptedLauncher).result()
        self._config = EngineConfig(
            max_num_batched_tokens=512, max_num_seqs=64, max_model_len=4096, block_size_tokens=BLOCK_SIZE_TOKENS
        )
        self._keeper = CostKeeper(asyncio.run(measure_costs(self._executor, self._config, self._new_pool())))
        self._draft: TorchExecutor | None = None
        if draft is not None:
            self._draft, _ = self._thread.submit(self._open, draft, ScriptedDrafts).result()
            self._draft_keeper = CostKeeper(asyncio.run(measure_costs(self._draft, self._config, self._new_pool())))

    def _open(self, directory: Path, launcher: type[StepLauncher]) -> tuple[TorchExecutor, int]:
        loaded = load_model(directory, device="cpu")
        backend = choose_backend(loaded, kernels="auto", num_threads=THREADS, block_size_tokens=BLOCK_SIZE_TOKENS)
        cache = KvCache.zeros(loaded.layout(BLOCK_SIZE_TOKENS), NUM_BLOCKS)
        executor = TorchExecutor(loaded.model, cache, thread=self._thread, backend=backend, new_launcher=launcher)
        executor.warm(8)
        return executor, loaded.vocab_size

    def _new_pool(self) -> BlockPool:
        return BlockPool(
            NUM_BLOCKS, BLOCK_SIZE_TOKENS, MemoryGenerationTable(bytearray(ENTRY_BYTES * NUM_BLOCKS), worker_epoch=1)
        )

    def _draft_model(self, mode: str) -> DraftModel | None:
        if mode != DRAFT or self._draft is None:
            return None
        keeper = self._draft_keeper
        return DraftModel(
            self._draft,
            self._new_pool(),
            vocab_size=self.vocab_size,
            max_model_len=self._config.max_model_len,
            eos_token_ids=(),
            costs=lambda: keeper.costs,
            clock=time.monotonic,
            on_step=lambda plan, step_s: keeper.observe(work_of(plan), step_s),
        )

    async def tpot_s(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], mode: str
    ) -> tuple[float, float]:
        """Run all prompts together. Returns (seconds per token after the first, acceptance of drafts)."""
        scripts = ScriptedLauncher.scripts = Scripts()
        scripts.answer_of = {prompt[0]: answer for prompt, answer in zip(prompts, answers, strict=True)}
        keeper = self._keeper
        engine = Engine(
            self._config, self._new_pool(), clock=time.monotonic, step_costs=lambda: keeper.costs,
            speculation=open_speculation(mode, self._draft_model(mode)),
        )  # fmt: skip
        times: dict[int, list[float]] = {}
        found: dict[int, list[int]] = {}

        def deliver(outcome: EngineOutcome) -> None:
            for output in outcome.outputs:
                times.setdefault(output.seq_id, []).append(time.perf_counter())
                found.setdefault(output.seq_id, []).extend(token.token_id for token in output.tokens)

        loop = EngineLoop(engine, self._executor, deliver, lambda plan, step_s: keeper.observe(work_of(plan), step_s))
        for request in sequence_requests(prompts, len(answers[0]), 1, BLOCK_SIZE_TOKENS):
            loop.add(request)
        loop.drain()
        await loop.run()
        if [found[i + 1] for i in range(len(answers))] != [list(answer) for answer in answers]:
            raise SystemExit(f"mode {mode}: an answer is not its script")
        gaps = [(own[-1] - own[0]) / (len(answers[0]) - 1) for own in times.values()]
        counters = engine.counters
        return statistics.fmean(gaps), counters.accepted_draft_tokens / max(1, counters.draft_tokens)

    def close(self) -> None:
        """Free the models. The thread ends with the first."""
        self._executor.close()
        if self._draft is not None:
            self._draft.close()


def scripted(text: str, num: int, num_outputs: int, vocab_size: int, rng: random.Random) -> tuple[list[list[int]], ...]:
    """Return prompts and their answers."""

    num_zipf = min(ZIPF_TOKENS, vocab_size - FIRST_ID)
    weights = [1 / rank for rank in range(1, num_zipf + 1)]

    def tokens(count: int) -> list[int]:
        if text == "zipf":
            return rng.choices(range(FIRST_ID, FIRST_ID + num_zipf), weights, k=count)
        return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]

    prompts, answers = [], []
    for first_id in rng.sample(range(FIRST_ID, vocab_size), num):
        document = tokens(DOCUMENT_TOKENS)
        answer: list[int] = []
        if text == "edit":
            answer = [token if rng.random() < 0.95 else rng.randrange(FIRST_ID, vocab_size) for token in document]
        while text == "extract" and len(answer) < num_outputs:
            begin = rng.randrange(DOCUMENT_TOKENS - 60)
            answer += [*document[begin : begin + rng.randint(10, 60)], *tokens(2)]
        prompts.append([first_id, *document])
        answers.append((answer + tokens(num_outputs))[:num_outputs])
    return prompts, answers


class SpeculationBench:
    """Measures all cells. `saved` has a list of figures for each model, cell and mode."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.saved = SavedFigures(arguments.out / "draft_tokens.json")

    @property
    def modes(self) -> Sequence[str]:
        """The modes to measure."""
        return (*MODES, DRAFT) if self._arguments.draft else MODES

    @property
    def models(self) -> Mapping[str, Path | None]:
        """Directory of each model; None for those that are created from their names."""
        own = self._arguments.model
        shapes = dict.fromkeys(name for name in self._arguments.models.split(",") if name)
        return shapes if own is None else {**shapes, own.name: own}

    def key(self, model: str) -> str:
        """Return the key of a model's figures. Figures of other cells have other keys."""
        chosen = self._arguments
        draft = f", draft {chosen.draft} right at {chosen.draft_right:g}" if chosen.draft else ""
        answers = "" if chosen.answers == ALL_TEXTS else f", answers {chosen.answers}"
        return f"{model}, {chosen.outputs} tokens, batches {chosen.batches}{answers}{draft}"

    def run(self) -> None:
        """Measure the missing figures."""
        self.saved.setdefault("machine", machine("torch"))
        for name, directory in self.models.items():
            found: dict[str, Any] = self.saved.get(self.key(name), {"repeats": 0, "cells": {}})
            if found["repeats"] >= self._arguments.repeats:
                continue
            own = directory or model_directory(name, self._arguments.out)
            engine = ScriptedEngine(own, self.draft_for(own))
            while found["repeats"] < self._arguments.repeats:
                self._repeat(engine, found)
                found["repeats"] += 1
                self.saved[self.key(name)] = found
            engine.close()

    def draft_for(self, model: Path) -> Path | None:
        """Return the directory of a model's draft model, which is created once; None without --draft."""
        if not (shape := self._arguments.draft):
            return None
        config = shape_config(shape)
        config.vocab_size = vocabulary(model)
        return created_model(config, self._arguments.out / "models" / f"{shape}-of-{config.vocab_size}-tokens")

    def _repeat(self, engine: ScriptedEngine, found: dict[str, Any]) -> None:
        rng = random.Random(found["repeats"])
        batches = [int(number) for number in self._arguments.batches.split(",")]
        cells = [(text, num) for text in self._arguments.answers.split(",") for num in batches]
        for text, num in rng.sample(cells, len(cells)):
            cell = found["cells"].setdefault(f"{text}, batch {num}", {})
            prompts, answers = scripted(text, num, self._arguments.outputs, engine.vocab_size, rng)
            for mode in rng.sample(self.modes, len(self.modes)):
                tpot_s, acceptance = asyncio.run(engine.tpot_s(prompts, answers, mode))
                cell.setdefault(mode, []).append({"tpot_s": tpot_s, "acceptance": acceptance})

    def show(self) -> None:
        """Print a table for each model: TPOT of each mode, and how many times faster than without drafts."""
        print(self.saved["machine"])
        for name in self.models:
            found = self.saved[self.key(name)]
            print(f"\n{self.key(name)}: medians of {found['repeats']} repeats\n")
            rows = [[cell, *(_shown(by_mode, mode) for mode in self.modes)] for cell, by_mode in found["cells"].items()]
            print(table(["answer", *self.modes], rows))


def _shown(by_mode: Mapping[str, Sequence[Mapping[str, float]]], mode: str) -> str:
    tpot_s = [one["tpot_s"] for one in by_mode[mode]]
    text = f"{1e3 * statistics.median(tpot_s):.2f} ms"
    if mode == "off":
        return text
    faster = [plain["tpot_s"] / own for plain, own in zip(by_mode["off"], tpot_s, strict=True)]
    times = f"{statistics.median(faster):.2f}x ({min(faster):.2f}-{max(faster):.2f})"
    return f"{text}, {times}, {statistics.median(one['acceptance'] for one in by_mode[mode]):.0%} accepted"


def texts_of(text: str) -> str:
    """Return --answers, each kind once. Raises argparse.ArgumentTypeError for an unknown kind."""
    kinds = set(text.split(","))
    if kinds - set(TEXTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(kinds - set(TEXTS)))}: must be of {ALL_TEXTS}")
    return ",".join(kind for kind in TEXTS if kind in kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures")
    parser.add_argument("--models", default="qwen3-0.6b,tiny-42m", help="comma-separated shapes (qwen3-0.6b,tiny-42m)")
    parser.add_argument("--model", type=Path, help="directory of one more model")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each cell (5)")
    parser.add_argument("--outputs", type=int, default=200, help="tokens of an answer (200)")
    parser.add_argument("--batches", default="1,8", help="answers at a time, comma-separated (1,8)")
    parser.add_argument(
        "--answers", type=texts_of, default=ALL_TEXTS, help=f"kinds of answers, comma-separated ({ALL_TEXTS})"
    )
    parser.add_argument("--draft", default="", help="shape of a draft model (none)")
    parser.add_argument("--draft-right", type=float, default=0.7, help="share of its tokens that are right (0.7)")
    parser.add_argument("--json", action="store_true", help="print a last line that is one JSON object")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ScriptedDrafts.share = arguments.draft_right
    measuring = SpeculationBench(arguments)
    measuring.run()
    measuring.show()
    if arguments.json:
        print(json.dumps(measuring.saved.data))


if __name__ == "__main__":
    main()
