"""Applies logit bias, penalties and bans to many rows of logits."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from baton.engine.state.step import SampleRequest
from baton.model.device.async_copy import upload

_Column = tuple[np.ndarray, np.ndarray]
"""(token ids, values) of one row."""


def process_logits(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Apply bias, penalties and bans, in this order, to rows of logits in place, and return them.

    logits: float64 [len(requests), vocab_size].
    The repetition penalty counts prompt and outputs; presence and frequency penalties count outputs only. All
    token ids must exist, see `unknown_token_id`, because an index error would stop a GPU.
    """
    _at(logits, map(_biases, requests), lambda now, by: now + by)
    _at(logits, map(_repeated, requests), lambda now, by: torch.where(now > 0, now / by, now * by))
    _at(logits, map(_outputs, requests), lambda now, by: now - by)
    _at(logits, map(_bans, requests), lambda _, by: by)
    return logits


def unknown_token_id(request: SampleRequest, vocab_size: int) -> int | None:
    """Return a token id outside the vocabulary that the request bans, biases or penalises, or None."""
    sampling = request.sampling
    if not (request.banned_token_ids or sampling.logit_bias or sampling.has_penalties):
        return None
    named = [*request.banned_token_ids, *(token_id for token_id, _ in sampling.logit_bias)]
    if sampling.has_penalties and len(request.tokens_before):
        named.append(int(np.array(request.tokens_before).max()))
    return next((token_id for token_id in named if not 0 <= token_id < vocab_size), None)


def _at(
    logits: torch.Tensor,
    columns: Iterable[_Column | None],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Change the logits at the columns of each row, each at most once."""
    found = [(row, *column) for row, column in enumerate(columns) if column is not None]
    if not found:
        return
    rows = np.repeat([row for row, _, _ in found], [len(ids) for _, ids, _ in found])
    at = tuple(upload(part, logits.device) for part in (rows, np.concatenate([ids for _, ids, _ in found])))
    by = upload(np.concatenate([values for _, _, values in found]), logits.device)
    logits[at] = change(logits[at], by)


def _biases(request: SampleRequest) -> _Column | None:
    bias = request.sampling.logit_bias
    if not bias:
        return None
    ids, places = np.unique(np.array([token_id for token_id, _ in bias], dtype=np.int64), return_inverse=True)
    values = np.zeros(len(ids))
    np.add.at(values, places, [value for _, value in bias])
    return ids, values


def _repeated(request: SampleRequest) -> _Column | None:
    penalty = request.sampling.repetition_penalty
    if penalty == 1.0:
        return None
    seen = np.unique(np.array(request.tokens_before, dtype=np.int64))
    return seen, np.full(len(seen), penalty)


def _outputs(request: SampleRequest) -> _Column | None:
    sampling = request.sampling
    if sampling.presence_penalty == 0.0 and sampling.frequency_penalty == 0.0:
        return None
    outputs, counts = np.unique(
        np.array(request.tokens_before, dtype=np.int64)[request.num_prompt_tokens :], return_counts=True
    )
    return outputs, sampling.presence_penalty + sampling.frequency_penalty * counts


def _bans(request: SampleRequest) -> _Column | None:
    ids = np.unique(np.array(request.banned_token_ids, dtype=np.int64))
    return (ids, np.full(len(ids), -np.inf)) if len(ids) else None
