"""Measures one worker on a GPU: start, TTFT, TPOT, KV in int8, FP8 files, drafts, beside transformers.

python -m bench engine_gpu --out DIR [--model SHAPE_OR_DIR] [--variants bf16,kv-int8,...] [--minutes 12]
[--kv-gib 8] [--json]

The engine runs alone, without gateway, once for each variant:

bf16: the defaults, without drafts. So are the other variants, where nothing else is said.
steps-512, steps-8192: with smaller and larger prompt chunks than the default of a GPU.
kv-int8: KV in int8.
fp8: the same weights as a fine-grained FP8 checkpoint. A GPU dequantises it at load, so decodes take as long.
torch: without Triton attention, compiled layers and CUDA graphs.
no-drafts, drafts: the same cell with `--speculate off` and `auto`. Greedy answers of random weights repeat
  themselves, so drafts are nearly always right: this is the most that they can gain.
restart: the defaults again, whose start finds verdicts, compiled kernels and page cache.
transformers: its continuous batching, with the same amount of KV memory.

Before the engines, the two paths of KV between two processes are measured, as workers do at start. DIR keeps
every figure as soon as it is measured, and a run that was stopped goes on there. The most telling cells come
first, and each is printed to standard error. A cell is not repeated after a minute. An answer that takes
longer ends the engine, and a later run tries its cell after all others. After `--minutes` no further cell
starts. `--device cpu --model tiny-42m` tries the script without a GPU.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.worker.device.kv_memory.kv_path import KvPath, PathSpeed, choose_kv_path, measure_path
from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_cells import GPU_CELLS, EngineCell
from bench.support.engine.engine_prompts import random_prompts
from bench.support.fp8_checkpoint import write_fp8
from bench.support.roofline import Needs, measured
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import BATCHED, Computes, started, vocabulary
from bench.systems.gpu_engine import EngineProcess, StartedEngine
from bench.systems.serving_systems import NO_DRAFTS, SystemSetting

MAX_MODEL_LEN = 8_448
CELL_S = 60.0
"""Longest wait for one answer of an engine, and time after which a cell is not repeated. On an H100, the
longest cell should take some seconds."""
FIRST = ("tpot-1", "tpot-8", "ttft-512", "ttft-2048", "ttft-8192")
"""The most telling cells, which are measured first."""
FEW = tuple(cell for cell in GPU_CELLS if cell.what != "throughput" and cell.num_tokens <= 2048 and cell.num <= 32)
PROMPTS = tuple(cell for cell in GPU_CELLS if cell.what == "TTFT")
ANSWERS = tuple(EngineCell(what="TPOT", num=num, num_tokens=320, num_outputs=200) for num in (1, 8))
"""Long answers, with and without drafts. No other cell has prompts of this length, and so this name."""
WARM = EngineCell(what="TPOT", num=2, num_tokens=300, num_outputs=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine.

    settings: of the worker. is_fp8: it loads the FP8 form of the model. is_peer: it is that of transformers.
    """

    cells: tuple[EngineCell, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_fp8: bool = False
    is_peer: bool = False


VARIANTS: Mapping[str, Variant] = {
    "bf16": Variant(cells=GPU_CELLS),
    "restart": Variant(cells=()),
    "transformers": Variant(cells=FEW, is_peer=True),
    "steps-512": Variant(cells=PROMPTS, settings={"max_num_batched_tokens": 512}),
    "kv-int8": Variant(cells=FEW, settings={"kv_dtype": "int8"}),
    "steps-8192": Variant(cells=PROMPTS, settings={"max_num_batched_tokens": 8192}),
    "no-drafts": Variant(cells=ANSWERS),
    "drafts": Variant(cells=ANSWERS, settings={"speculate": "auto"}),
    "fp8": Variant(cells=FEW, is_fp8=True),
    "torch": Variant(cells=FEW, settings={"kernels": "torch"}),
}
"""In the order in which they are measured: a run that ends early has the most telling ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyEngine:
    """An engine that can be measured. started: None for an engine of a peer."""

    compute: Computes
    summary: str
    start_s: float
    started: StartedEngine | None = None


class GpuBench:
    """Measures what is missing.

    `saved` has one entry a variant: `summary` and `start_s` once its engine was ready, `figures` by cell,
    `acceptance` of drafts, `problems` by cell, and the `problem` that ended the last attempt.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self._ends_s = time.monotonic() + 60 * arguments.minutes
        given = Path(arguments.model)
        self._model = given if given.is_dir() else model_directory(arguments.model, self._out)
        self.saved = SavedFigures(self._out / "engine_gpu.json")

    def run(self) -> None:
        """Measure until all is done or the time is over. Failed variants are noted, and tried again later."""
        device = self._arguments.device
        self.saved.setdefault("machine", machine("torch", "transformers", "nixl"))
        if "kv paths" not in self.saved:
            self.saved["kv paths"] = {path.value: asdict(measure_path(path, device)) for path in KvPath}
        if "roofline" not in self.saved:
            limits = measured(num_threads=2, device=device)
            self.saved["roofline"] = {"flops": limits.flops, "bytes": limits.bytes}
        for name in self._arguments.variants.split(","):
            missing = self._missing_cells(name)
            if not missing and "start_s" in self.saved.get(name, {}):
                continue
            if self._is_over:
                _say(f"{name}: not measured, {self._arguments.minutes:g} minutes are over")
                continue
            self._note(name, problem="")
            try:
                self._measure(name, missing)
            except (RuntimeError, OSError, EOFError) as error:  # EOFError: the engine's process ended
                self._note(name, problem=str(error) or "the engine's process ended; see its output")
                _say(f"{name}: {self.saved[name]['problem']}")

    def _measure(self, name: str, cells: Sequence[EngineCell]) -> None:
        """Start the engine of a variant, and measure its cells. What is known is saved at once."""
        with self._engine(VARIANTS[name]) as engine:
            if "start_s" not in self.saved[name]:  # a later start finds compiled kernels
                self._note(name, summary=engine.summary, start_s=engine.start_s)
            _say(f"{name}: {engine.start_s:.1f} s to start, {engine.summary}")
            if cells:
                self._figure(engine.compute, WARM, random.Random(0))
            for cell in cells:
                if self._is_over:
                    raise RuntimeError(f"{cell.name} and later cells: {self._arguments.minutes:g} minutes are over")
                try:
                    figure = self._figure(engine.compute, cell, random.Random(cell.name))
                except (RuntimeError, OSError, EOFError) as error:
                    problem = str(error) or "the engine's process ended"
                    self._note(name, problems={**self._problems(name), cell.name: problem})
                    raise RuntimeError(f"{cell.name}: {problem}") from error
                failed = {other: text for other, text in self._problems(name).items() if other != cell.name}
                self._note(name, figures={**self.saved[name].get("figures", {}), cell.name: figure}, problems=failed)
                _say(f"{name} {cell.name}: {_shown(cell, figure)}")
            if engine.started is not None:
                self._note(name, acceptance=engine.started.acceptance())

    def _note(self, name: str, **fields: Any) -> None:
        self.saved[name] = {**self.saved.get(name, {}), **fields}

    def _problems(self, name: str) -> dict[str, str]:
        problems: dict[str, str] = self.saved.get(name, {}).get("problems", {})
        return problems

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_s

    @contextmanager
    def _engine(self, variant: Variant) -> Iterator[ReadyEngine]:
        if variant.is_peer:
            setting = SystemSetting(
                model=self._model,
                max_model_len=MAX_MODEL_LEN,
                cores=(0, 1),
                kv_gib=self._arguments.kv_gib,
                vllm=Path(),
                logs=self._out,
                device=self._arguments.device,
            )
            began_s = time.perf_counter()
            with started(BATCHED, setting, CELL_S) as compute:
                yield ReadyEngine(compute=compute, summary=BATCHED, start_s=time.perf_counter() - began_s)
            return
        model = write_fp8(self._model, self._out / "models" / f"{self._model.name}-fp8") if variant.is_fp8 else None
        settings = {
            "model": str(model or self._model),
            "max_model_len": MAX_MODEL_LEN,
            "kv_memory": self._arguments.kv_gib * 2**30,
            "device": self._arguments.device,
            "speculate": NO_DRAFTS,
            **variant.settings,
        }
        with EngineProcess(settings, CELL_S) as engine:
            yield ReadyEngine(compute=engine, summary=engine.summary, start_s=engine.start_s, started=engine)

    def _missing_cells(self, name: str) -> list[EngineCell]:
        """Return the cells without a figure that fit into KV memory: `FIRST`, others, then failed ones."""
        saved = self.saved.get(name, {})
        failed, done = self._problems(name), saved.get("figures", {})
        capacity = self._arguments.kv_gib * 2**30 // Needs.of(self._model).kv_bytes_per_token
        missing = [
            cell
            for cell in VARIANTS[name].cells
            if cell.name not in done and cell.num * (cell.num_tokens + cell.num_outputs) <= capacity
        ]
        ranks = {cell: rank for rank, cell in enumerate(FIRST)}
        return sorted(missing, key=lambda cell: (cell.name in failed, ranks.get(cell.name, len(ranks))))

    def _figure(self, engine: Computes, cell: EngineCell, rng: random.Random) -> float:
        size = vocabulary(self._model)
        figures: list[float] = []
        began_s = time.monotonic()
        while len(figures) < cell.tries and (not figures or time.monotonic() < began_s + CELL_S):
            prompts = random_prompts(cell.num, cell.num_tokens, size, rng)
            if cell.what == "TPOT":
                engine(prompts, 1)  # all sequences then start to decode together
            figures.append(cell.figure(engine(prompts, cell.num_outputs)))
        return statistics.median(figures)

    def show(self) -> None:
        """Print the paths of KV, the start of each variant, and a table of all cells."""
        print(self.saved["machine"])
        paths = {path: PathSpeed(**self.saved["kv paths"][path.value]) for path in KvPath}
        choice = choose_kv_path(paths[KvPath.DIRECT], paths[KvPath.STAGED])
        print(f"\nKV between two processes: {choice.path.value} ({choice.reason})\n")
        found = {name: self.saved[name] for name in VARIANTS if name in self.saved}
        for name, each in found.items():
            start = [f"{each['start_s']:.0f} s to start, {each['summary']}"] if "start_s" in each else []
            print(f"{name}: {'; '.join([*start, *filter(None, [each.get('problem')])])}")
        done = {name: each for name, each in found.items() if each.get("figures")}
        needs, limits = Needs.of(self._model), self.saved["roofline"]
        rows = []
        for cell in (*GPU_CELLS, *ANSWERS):
            own = {name: each["figures"][cell.name] for name, each in done.items() if cell.name in each["figures"]}
            if own:
                limit_s = cell.roofline_s(needs, limits["flops"], limits["bytes"])
                shares = [cell.roofline_share(own[name], limit_s) for name in own if not VARIANTS[name].is_peer]
                best = max(shares, default=0.0)
                rows.append([cell.name, *(_shown(cell, own.get(name)) for name in done), f"{best:.0%}"])
        print(table(["", *done, "Baton's best, of the roofline"], rows))
        if "acceptance" in found.get("drafts", {}):
            print(f"\ndrafts: {found['drafts']['acceptance']:.0%} were right")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(cell: EngineCell, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} req/s" if cell.what == "throughput" else f"{1e3 * value:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures and models")
    parser.add_argument("--model", default="qwen3-0.6b", help="shape with random weights, or a directory (qwen3-0.6b)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"comma-separated ({','.join(VARIANTS)})")
    parser.add_argument("--minutes", type=float, default=12.0, help="time after which no cell starts (12)")
    parser.add_argument("--kv-gib", type=int, default=8, help="KV memory in GiB (8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device that computes (cuda)")
    parser.add_argument("--json", action="store_true", help="print a last line that is one JSON object")
    arguments = parser.parse_args()
    if unknown := set(arguments.variants.split(",")) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; choose from {', '.join(VARIANTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    measuring = GpuBench(arguments)
    measuring.run()
    measuring.show()
    if arguments.json:
        print(json.dumps(measuring.saved.data))


if __name__ == "__main__":
    main()
