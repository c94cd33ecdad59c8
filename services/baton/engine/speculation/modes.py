"""The values of `--speculate`: which drafters a worker has."""

from typing import Literal

from baton.engine.speculation.forced_drafter import ForcedDrafter
from baton.engine.speculation.ngram_drafter import NgramDrafter
from baton.engine.speculation.speculation import Speculation
from baton.engine.speculation.suffix_drafter import SuffixDrafter

SpeculationMode = Literal["auto", "ngram", "off"]


def open_speculation(mode: SpeculationMode) -> Speculation | None:
    """Return the speculation of one engine; None if it drafts nothing."""
    if mode == "off":
        return None
    if mode == "ngram":
        return Speculation([NgramDrafter()], needs_costs=False)
    forced = ForcedDrafter()
    return Speculation([forced, NgramDrafter(), SuffixDrafter()], forced=forced)


def finds_forced_tokens(mode: SpeculationMode) -> bool:
    """Return True if steps should return the tokens that grammars force."""
    return mode == "auto"
