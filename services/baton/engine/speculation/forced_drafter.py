"""Drafts from grammars: the tokens that a constrained response is forced to continue with.

A step that draws a token of a constrained sequence returns what its grammar forces after it
(`StepResult.forced`). The grammar forces a text; that the model writes it with these tokens is a guess.
"""

from baton.core.kv.block_hash import BlockHash, TokenIds
from baton.engine.speculation.drafter import MAX_DRAFT_TOKENS, Draft


class ForcedDrafter:
    """Guesses the tokens that the last step has returned as forced."""

    name = "grammar"
    learns = False

    def __init__(self) -> None:
        self._forced: dict[int, tuple[int, tuple[int, ...]]] = {}

    def offer(self, key: int, position: int, token_ids: tuple[int, ...]) -> None:
        """Take the tokens that are forced from `position` on."""
        self._forced[key] = position, token_ids[:MAX_DRAFT_TOKENS]

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        """Learn nothing: each step offers the tokens after its own."""

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        position, forced = self._forced.pop(key, (0, ()))
        return Draft(forced) if forced and position == len(token_ids) else None

    def forget(self, key: int) -> None:
        self._forced.pop(key, None)

    def __len__(self) -> int:
        return len(self._forced)
