"""The cells that the engine benchmarks measure: TTFT, TPOT and throughput at some lengths and batch sizes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from bench.support.roofline import Needs

DECODED = 33
CONTEXT = 256
"""Tokens of the prompts before most measurements of TPOT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCell:
    """One measurement.

    what: "TTFT", "TPOT" or "throughput".
    num: prompts sent together.
    num_tokens: tokens per prompt.
    num_outputs: output tokens per prompt.
    tries: repetitions; the median counts.
    """

    what: str
    num: int
    num_tokens: int
    num_outputs: int
    tries: int = 1

    @property
    def name(self) -> str:
        """A name without blanks: `ttft-512`, `tpot-8`, `tpot-8x2048` (not CONTEXT), or `mix-16x512-64`."""
        if self.what == "TTFT":
            return f"ttft-{self.num_tokens}"
        if self.what == "TPOT":
            return f"tpot-{self.num}" + ("" if self.num_tokens == CONTEXT else f"x{self.num_tokens}")
        return f"mix-{self.num}x{self.num_tokens}-{self.num_outputs}"

    def figure(self, times: Sequence[Sequence[float]]) -> float:
        """Return seconds (TTFT, TPOT) or requests per second (throughput).

        `times` has the arrival times of the tokens of each prompt, in seconds since the requests were sent.
        Raises RuntimeError for a TPOT if no token came after the first ones, because nothing was streamed.
        """
        if self.what == "TTFT":
            return times[0][0]
        if self.what == "throughput":
            return self.num / max(each[-1] for each in times)
        begin_s = max(each[0] for each in times)
        decoding = [each for each in times if each[-1] > begin_s]
        if not decoding:
            raise RuntimeError("all tokens came at once, so they have no TPOT")
        return statistics.fmean(
            (each[-1] - begin_s) / _tokens_after(each, begin_s, self.num_outputs) for each in decoding
        )

    def roofline_s(self, needs: Needs, flops: float, num_bytes: float) -> float:
        """Return the minimum seconds for this cell at the given hardware rates.

        flops: operations per second; num_bytes: bytes read per second. A throughput cell is modelled as all
        prompts one after the other, followed by one decode batch of all sequences.
        """
        if self.what == "TTFT":
            return needs.prefill_flops(self.num_tokens) / flops
        if self.what == "TPOT":
            return needs.decode_bytes(self.num, self.num_tokens + self.num_outputs / 2) / num_bytes
        prompts_s = self.num * needs.prefill_flops(self.num_tokens) / flops
        return (
            prompts_s
            + (self.num_outputs - 1) * needs.decode_bytes(self.num, self.num_tokens + self.num_outputs / 2) / num_bytes
        )

    def roofline_share(self, figure: float, limit_s: float) -> float:
        """Return the share of the roofline that `figure` reaches. `limit_s` is the result of `roofline_s`."""
        return limit_s * figure / self.num if self.what == "throughput" else limit_s / figure


def _tokens_after(times: Sequence[float], begin_s: float, num_outputs: int) -> float:
    """Estimate the tokens that arrived after `begin_s`. A late server sends several tokens in one message."""
    return max(1.0, sum(at_s > begin_s for at_s in times) * num_outputs / len(times))


MIXES = (
    EngineCell(what="throughput", num=16, num_tokens=512, num_outputs=64),
    EngineCell(what="throughput", num=8, num_tokens=2048, num_outputs=16),
    EngineCell(what="throughput", num=32, num_tokens=64, num_outputs=256),
)

GPU_CELLS = (
    *(
        EngineCell(what="TTFT", num=1, num_tokens=num_tokens, num_outputs=2, tries=tries)
        for num_tokens, tries in ((128, 7), (512, 5), (2048, 3), (8192, 1))
    ),
    *(
        EngineCell(what="TPOT", num=num, num_tokens=num_tokens, num_outputs=DECODED)
        for num_tokens in (CONTEXT, 2048)
        for num in (1, 8, 32, 64)
    ),
    *MIXES,
)

FORMAT_CELLS = (
    *(
        EngineCell(what="TTFT", num=1, num_tokens=num_tokens, num_outputs=2, tries=tries)
        for num_tokens, tries in ((128, 5), (512, 3), (2048, 1))
    ),
    *(EngineCell(what="TPOT", num=num, num_tokens=CONTEXT, num_outputs=DECODED) for num in (1, 8, 32)),
    *MIXES,
    *(EngineCell(what="throughput", num=num, num_tokens=128, num_outputs=64) for num in (1, 4, 16, 64)),
)


CELLS_BY_NAME = {cell.name: cell for cell in FORMAT_CELLS}
"""Cells of the benchmark `engine`, by name."""


def chosen(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns (`tpot-*`), in their own order.

    Raises ValueError with the names for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise ValueError(f"{pattern} matches none of: {', '.join(names)}")
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
