"""The benchmark `draft_tokens`: scripted answers, and the order of measurements."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.core.kv.block_hash import token_ids
from baton.engine.speculation.ngram_drafter import NgramDrafter
from bench.scenarios.engine.draft_tokens import MODES, SpeculationBench, scripted, texts_of


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


class NotedEngine:
    """Notes each measurement as (prompts, mode)."""

    vocab_size = 32_000

    def __init__(self) -> None:
        self.measured: list[tuple[Sequence[Sequence[int]], str]] = []

    async def tpot_s(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], mode: str
    ) -> tuple[float, float]:
        self.measured.append((prompts, mode))
        return 0.1, 0.0


def test_modes_of_a_cell_are_measured_one_after_the_other(tmp_path: Path) -> None:
    """So a machine that becomes slower affects all of them."""
    arguments = argparse.Namespace(out=tmp_path, answers="random", batches="1,8", outputs=5, draft="")
    found: dict[str, Any] = {"repeats": 0, "cells": {}}
    engine = NotedEngine()
    SpeculationBench(arguments)._repeat(engine, found)  # type: ignore[arg-type]
    cells = [engine.measured[:3], engine.measured[3:]]
    assert sorted(len(cell[0][0]) for cell in cells) == [1, 8]
    for cell in cells:
        assert {mode for _, mode in cell} == set(MODES)
        assert all(prompts == cell[0][0] for prompts, _ in cell), "modes are compared on the same text"
    assert found["cells"].keys() == {"random, batch 1", "random, batch 8"}


def test_kinds_of_answers_are_checked_and_measured_once() -> None:
    assert texts_of("zipf,edit,edit") == "edit,zipf"
    with pytest.raises(argparse.ArgumentTypeError, match="edits: must be of edit,extract,random,zipf"):
        texts_of("edits,zipf")
