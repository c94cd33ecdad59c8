"""The most likely tokens that torch and the C++ kernel find equal their definition."""

import numpy as np
import pytest
import torch

from baton.core.errors import LayoutMismatch
from baton.engine.constraints.token_bits import bits_of, num_words
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.sampling.best_tokens import FindBest, find_best

NO_ROWS = np.empty(0, dtype=np.intp)
FINDERS = pytest.mark.parametrize("num_threads", [None, 1, 2])


def finder(num_threads: int | None) -> FindBest:
    return find_best if num_threads is None else load_kernels(num_threads).find_best


@FINDERS
@pytest.mark.parametrize("vocab_size", [1, 31, 97, 256, 1000, 9001])
def test_most_likely_tokens_equal_the_definition(num_threads: int | None, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-4, 4, (12, vocab_size)).astype(np.float32)  # many are equal
    sizes = (1, 1, min(3, vocab_size), vocab_size // 40 + 1, vocab_size // 3 + 1, vocab_size)
    masked = np.array([11, 3, 7, 0, 5, 2])
    allowed = [np.sort(rng.choice(vocab_size, size, replace=False)) for size in sizes]
    logits[3, allowed[1]] = logits[0, allowed[3]] = -np.inf  # no allowed token can be drawn
    bits = np.stack([bits_of(ids.tolist(), vocab_size) for ids in allowed])

    best = finder(num_threads)(torch.from_numpy(logits), masked, bits)

    of_row = dict(zip(masked.tolist(), allowed, strict=True))
    for row, one in enumerate(logits):
        ids = of_row.get(row, np.arange(vocab_size))
        highest = one[ids].max()
        assert bool(best.are_finite[row]) == np.isfinite(one.max())
        if np.isfinite(one.max()):
            assert bool(best.have_choice[row]) == (highest > -np.inf)
        if highest > -np.inf:
            assert int(best.token_ids[row]) == ids[one[ids].argmax()]


@FINDERS
@pytest.mark.parametrize("vocab_size", [40, 700])
def test_rows_that_are_not_finite_are_found(num_threads: int | None, vocab_size: int) -> None:
    logits = torch.zeros(5, vocab_size)
    logits[0, vocab_size - 1] = logits[1, 3] = torch.nan
    logits[2, 17] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    best = finder(num_threads)(logits, NO_ROWS, np.zeros((0, num_words(vocab_size)), dtype=np.uint32))
    assert best.are_finite.tolist() == [False, False, False, False, True]
    assert best.token_ids[4] == 0


@FINDERS
def test_logits_may_have_any_stride(num_threads: int | None) -> None:
    logits = torch.arange(3 * 600.0).reshape(600, 3)
    no_bits = np.zeros((0, num_words(600)), dtype=np.uint32)
    assert finder(num_threads)(logits.T, NO_ROWS, no_bits).token_ids.tolist() == [599] * 3
    wide = torch.zeros(4, 900)
    wide[torch.arange(4), torch.tensor([5, 250, 260, 599])] = 1.0
    wide[:, 600:] = 2.0
    assert finder(num_threads)(wide[:, :600], NO_ROWS, no_bits).token_ids.tolist() == [5, 250, 260, 599]


def test_masks_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="300 logits"):
        load_kernels(1).find_best(torch.zeros(1, 300), np.array([0]), bits_of([1], 256)[None])
