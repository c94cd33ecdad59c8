"""The values of `--speculate`: which drafters a worker has."""

from baton.engine.speculation.draft_model import DraftModel
from baton.engine.speculation.forced_drafter import ForcedDrafter
from baton.engine.speculation.ngram_drafter import NgramDrafter
from baton.engine.speculation.speculation import Speculation
from baton.engine.speculation.suffix_drafter import SuffixDrafter


def open_speculation(mode: str, model: DraftModel | None = None) -> Speculation | None:
    """Return the speculation of one engine; None if it drafts nothing.

    model: the opened draft model that `mode` names.
    """
    if mode == "off":
        return None
    if mode == "ngram":
        return Speculation([NgramDrafter()], needs_costs=False)
    forced = ForcedDrafter()
    return Speculation([forced, NgramDrafter(), SuffixDrafter()], forced=forced, model=model)


def finds_forced_tokens(mode: str) -> bool:
    """Return True if steps should return the tokens that grammars force."""
    return mode not in ("ngram", "off")
