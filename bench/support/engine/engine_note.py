"""Writes the figures of the benchmark `engine` as a page for docs/benchmarks/log."""

from collections.abc import Sequence

from bench.support.engine.engine_cells import CELLS_BY_NAME
from bench.support.engine.engine_figures import EngineFigures
from bench.support.engine.engine_formats import Contestant, contestants
from bench.support.engine.engine_targets import ModelFigures, target_rows
from bench.systems.baton_cluster import table
from bench.systems.engines import ALONE, BATON

OWN = (BATON, ALONE)


def note(title: str, head: Sequence[str], models: Sequence[ModelFigures], *, has_vnni: bool) -> str:
    """Return the page: the paragraphs `head`, then each model's tables by format, failures and targets."""
    parts = [f"# {title}", *head]
    for model in models:
        for format_name in model.figures:
            parts.append(f"## {model.model}, {format_name}")
            parts += _format_parts(model, format_name)
        rows = [row.cells() for row in target_rows(model, has_vnni=has_vnni)]
        parts += [f"## {model.model}, targets", table(["target", "reached", "at least", "met"], rows)]
    return "\n\n".join(parts) + "\n"


def _format_parts(model: ModelFigures, format_name: str) -> list[str]:
    figures = model.figures[format_name]
    systems = tuple(dict.fromkeys(name for _, name in _measured(figures, format_name)))
    flops, num_bytes = figures.limit("flops"), figures.limit("bytes")
    parts = []
    if flops is not None and num_bytes is not None:
        load = max(each.get("load", 0.0) for each in figures.limits)
        parts.append(
            f"Products {flops / 1e9:,.0f} GFLOP/s, reading {num_bytes / 1e9:.1f} GB/s; {figures.num_repeats} repeats; "
            f"load of the machine before them at most {load:.1f}."
        )
    if systems:
        parts += [
            table(["", *systems], [_value_row(figures, cell, systems) for cell in _cells(figures, systems)]),
            table(
                [f"{BATON}: times as fast as", *_peers(systems)],
                [_ratio_row(figures, format_name, cell, systems) for cell in _cells(figures, systems)],
            ),
            table(
                ["share of the roofline", *systems],
                [_share_row(model, format_name, cell, systems) for cell in _cells(figures, systems)],
            ),
        ]
    if figures.failures:
        parts.append(table(["failed", "why"], [[name, _one_line(why)] for name, why in figures.failures.items()]))
    return parts


def _measured(figures: EngineFigures, format_name: str) -> list[tuple[str, str]]:
    """Return (cell, name) of each figure, contestants in their order."""
    names = [each.name for each in contestants(format_name)]
    return [(cell, name) for name in names for cell in CELLS_BY_NAME if figures.values(cell, name)]


def _cells(figures: EngineFigures, names: Sequence[str]) -> list[str]:
    return [cell for cell in CELLS_BY_NAME if any(figures.values(cell, name) for name in names)]


def _peers(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith(f"{BATON},")]


def _value_row(figures: EngineFigures, cell: str, names: Sequence[str]) -> list[str]:
    shown = []
    for name in names:
        value = figures.median(cell, name)
        is_rate = CELLS_BY_NAME[cell].what == "throughput"
        shown.append("" if value is None else f"{value:.2f} req/s" if is_rate else f"{1e3 * value:.1f} ms")
    return [cell, *shown]


def _ratio_row(figures: EngineFigures, format_name: str, cell: str, names: Sequence[str]) -> list[str]:
    own = Contestant(BATON, format_name).name
    ratios = [figures.ratio(cell, own, peer) for peer in _peers(names)]
    return [cell, *("" if ratio is None else str(ratio) for ratio in ratios)]


def _share_row(model: ModelFigures, format_name: str, cell: str, names: Sequence[str]) -> list[str]:
    by_name = {each.name: each for each in contestants(format_name)}
    shares = [model.share(format_name, cell, by_name[name]) for name in names]
    return [cell, *("" if share is None else f"{share:.0%}" for share in shares)]


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
