"""Scripted answers of the benchmark `draft_tokens`."""

from random import Random

import pytest

from baton.core.kv.block_hash import token_ids
from baton.engine.speculation.ngram_drafter import NgramDrafter
from bench.scenarios.engine.draft_tokens import scripted


def first_guesses(text: str) -> tuple[int, int]:
    """Return how many first tokens of n-gram drafts are right, and how many are wrong."""
    (prompt,), (answer,) = scripted(text, 1, 300, 32_000, Random(1))
    drafter, right, wrong = NgramDrafter(), 0, 0
    for number, token in enumerate(answer):
        known = token_ids(prompt + answer[:number])
        drafter.observe(1, known, 1, bytes(16))
        draft = drafter.draft(1, known, bytes(16))
        if draft is not None:
            right, wrong = right + (draft.tokens[0] == token), wrong + (draft.tokens[0] != token)
    return right, wrong


@pytest.mark.parametrize(
    ("text", "drafts", "right"),
    [("edit", (200, 300), (0.8, 1.0)), ("random", (0, 0), (0, 1)), ("zipf", (60, 250), (0.0, 0.3))],
)
def test_texts_differ_in_how_many_drafts_there_are_and_are_right(
    text: str, drafts: tuple[int, int], right: tuple[float, float]
) -> None:
    num_right, num_wrong = first_guesses(text)
    assert drafts[0] <= num_right + num_wrong <= drafts[1]
    assert right[0] <= num_right / max(1, num_right + num_wrong) <= right[1]
