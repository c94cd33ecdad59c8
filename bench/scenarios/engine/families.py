"""Measures each model family's share of the roofline: decode at batch 1, and a prompt of 512 tokens.

python -m bench families --out DIR [--families qwen3,gemma-3,...] [--repeats 5] [--show]

A model has the widths of a published one, random weights in bfloat16, and four layers
(`bench/support/engine/family_shapes.py`). Baton's engine runs it in a process, without gateway. Decode is
compared with the time in which the same threads read a buffer as large as the weights, a prompt with the rate
of bfloat16 products. Each repeat begins with both rates. Of a mixture of experts, only the experts count that
a token computes. With few layers the vocabulary is a larger part of the model than in the published one.

DIR keeps each figure and each model. A family that cannot be run gets a row that says why. An interrupted run
continues where it stopped.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from bench.support.created_model import created_model
from bench.support.engine.engine_cells import CELLS_BY_NAME, EngineCell
from bench.support.engine.engine_prompts import REST_S, random_prompts
from bench.support.engine.family_shapes import FAMILY_SHAPES, family_needs
from bench.support.roofline import Needs, measured
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import ALONE, THREADS, Computes, started, vocabulary
from bench.systems.serving_systems import NO_DRAFTS, SystemSetting

CELLS = ("tpot-1", "ttft-512")
MAX_MODEL_LEN = 2048


def family_directory(family: str, out: Path) -> Path:
    """Return the directory of a family's model, which is created once."""
    return created_model(FAMILY_SHAPES[family][1](), out / "models" / family)


def shares(needs: Needs, repeats: Sequence[Mapping[str, float]], cell: str) -> list[float]:
    """Return the share of the roofline in each repeat, with the rates that were measured in it."""
    found = []
    for repeat in repeats:
        limit_s = CELLS_BY_NAME[cell].roofline_s(needs, repeat["flops"], repeat["bytes"])
        found.append(CELLS_BY_NAME[cell].roofline_share(repeat[cell], limit_s))
    return found


def row(family: str, found: Mapping[str, Any], needs: Needs | None) -> list[str]:
    """Return the table row of a family. `needs` is None if it could not be run."""
    if needs is None:
        return [family, FAMILY_SHAPES[family][0], *[""] * (2 * len(CELLS)), found.get("failed", "not measured")]
    cells = []
    for cell in CELLS:
        of_roofline = shares(needs, found["repeats"], cell)
        median_s = statistics.median(repeat[cell] for repeat in found["repeats"])
        spread = f"{min(of_roofline):.0%}-{max(of_roofline):.0%}"
        cells += [f"{1e3 * median_s:.1f} ms", f"{statistics.median(of_roofline):.0%} ({spread})"]
    return [family, FAMILY_SHAPES[family][0], *cells, ""]


class FamilyBench:
    """Measures the chosen families one after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.saved = SavedFigures(arguments.out / "families.json")

    def run(self) -> None:
        """Measure the missing repeats."""
        self.saved.setdefault("machine", machine("torch", "transformers"))
        for family in self._arguments.families:
            found: dict[str, Any] = self.saved.get(family, {"repeats": []})
            if len(found["repeats"]) >= self._arguments.repeats:
                continue
            try:
                self._family(family, found)
            except (BatonError, OSError, EOFError, RuntimeError, ValueError) as error:
                found["failed"] = f"{type(error).__name__}: {error}"
                self.saved[family] = found
                print(f"{family}: {found['failed']}", file=sys.stderr)

    def _family(self, family: str, found: dict[str, Any]) -> None:
        directory = family_directory(family, self._arguments.out)
        needs, size = family_needs(directory), vocabulary(directory)
        logs = self._arguments.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        setting = SystemSetting(
            model=directory,
            max_model_len=MAX_MODEL_LEN,
            cores=(0, 1),
            kv_gib=1,
            vllm=Path(),
            logs=logs,
            speculate=NO_DRAFTS,
        )
        with started(ALONE, setting) as engine:
            while len(found["repeats"]) < self._arguments.repeats:
                rng = random.Random(len(found["repeats"]))
                limits = measured(THREADS, read_bytes=2 * needs.weight_params)
                repeat = {"flops": limits.flops, "bytes": limits.bytes}
                for name in CELLS:
                    repeat[name] = _figure(engine, CELLS_BY_NAME[name], size, rng)
                found["repeats"].append(repeat)
                found.pop("failed", None)
                self.saved[family] = found
                print(f"{family}: {repeat}", file=sys.stderr)

    def show(self) -> None:
        """Print the table of the chosen families."""
        print(f"{self.saved.get('machine', 'not measured')}\n")
        rows = []
        for family in self._arguments.families:
            found = self.saved.get(family, {"repeats": []})
            needs = family_needs(family_directory(family, self._arguments.out)) if found["repeats"] else None
            rows.append(row(family, found, needs))
        print(table(["family", "widths of", "TPOT", "of reading", "TTFT 512", "of products", "why not"], rows))


def _figure(engine: Computes, cell: EngineCell, size: int, rng: random.Random) -> float:
    """Return the median over the cell's tries, after one that is not counted."""
    figures = []
    for _ in range(1 + cell.tries):
        prompts = random_prompts(cell.num, cell.num_tokens, size, rng)
        time.sleep(REST_S)
        figures.append(cell.figure(engine(prompts, cell.num_outputs)))
    return statistics.median(figures[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps figures and models")
    names = ",".join(FAMILY_SHAPES)
    parser.add_argument("--families", default=names, help=f"comma-separated ({names})")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each family (5)")
    parser.add_argument("--show", action="store_true", help="print the figures in --out without measuring")
    arguments = parser.parse_args()
    arguments.families = arguments.families.split(",")
    if unknown := [name for name in arguments.families if name not in FAMILY_SHAPES]:
        parser.error(f"unknown family {unknown[0]}; choose from {names}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = FamilyBench(arguments)
    if not arguments.show:
        bench.run()
    bench.show()


if __name__ == "__main__":
    main()
