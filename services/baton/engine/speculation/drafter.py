"""The interface of drafters, which guess how responses continue."""

from dataclasses import dataclass
from typing import Protocol

from baton.core.kv.block_hash import BlockHash, TokenIds

MAX_DRAFT_TOKENS = 15
"""Longest draft. With the token before it, it fills one tile of 16 rows of a matrix product."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of the next tokens of one response.

    tokens: at least one.
    strength: how well the guess is founded, from 0, in the terms of its drafter. Acceptance is measured for
        each strength.
    """

    tokens: tuple[int, ...]
    strength: int = 0


class Drafter(Protocol):
    """Guesses from final tokens only. It has no clock, no randomness and no I/O, and its memory is bounded.

    A drafter never changes a response, whatever it returns: the model verifies each token
    (`engine.state.draft_rows`). `key` is `EngineSequence.key`.
    """

    @property
    def name(self) -> str:
        """Name for measurements of acceptance; unique in a process."""
        ...

    @property
    def learns(self) -> bool:
        """True if the drafts of later sequences use what is observed of a sequence."""
        ...

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        """Take note of the last `num_new` of `token_ids`, prompt and response of a sequence. They are final.

        Several steps may have appended them.
        tenant: root of its block hashes. What is learned from one tenant is used for it only.
        """
        ...

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        """Guess the tokens after `token_ids`, all of which were observed. At most `MAX_DRAFT_TOKENS`.

        None without a guess.
        """
        ...

    def forget(self, key: int) -> None:
        """Drop what belongs to one sequence, which has ended. Unknown keys are ignored."""
        ...
