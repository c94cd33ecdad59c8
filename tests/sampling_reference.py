"""The definition of a draw in plain Python, for comparison with the samplers."""

import math
from collections import Counter
from collections.abc import Collection

import numpy as np

from baton.engine.state.step import SampleRequest
from baton.model.sampling.host_sampler import noise


def reference_choice(
    logits: np.ndarray, request: SampleRequest, sample_index: int, allowed: Collection[int] | None = None
) -> int:
    """Return the token that a sample draws from float32 `logits` [vocab_size].

    allowed: the only tokens that may be drawn; None allows all.
    """
    sampling, values = request.sampling, logits.astype(np.float64)
    for token_id, bias in sampling.logit_bias:
        values[token_id] += bias
    for token_id in set(request.history):
        penalty = sampling.repetition_penalty
        values[token_id] = values[token_id] / penalty if values[token_id] > 0 else values[token_id] * penalty
    for token_id, count in Counter(request.history[request.num_prompt_tokens :]).items():
        values[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * count
    ids = sorted(set(range(len(values)) if allowed is None else allowed).difference(request.banned_token_ids))
    if sampling.is_greedy:
        return max(ids, key=lambda token_id: (values[token_id], -token_id))
    scaled = {token_id: values[token_id] / sampling.temperature for token_id in ids}
    least = _threshold(sorted(scaled.values(), reverse=True), request)
    noises = noise(sampling.seed, sample_index, request.position, len(values))
    kept = [token_id for token_id in ids if scaled[token_id] >= least]
    return max(kept, key=lambda token_id: (scaled[token_id] + noises[token_id], -token_id))


def _threshold(descending: list[float], request: SampleRequest) -> float:
    """Return the lowest scaled logit that top-k, then top-p, then min-p keep."""
    sampling, best, least = request.sampling, descending[0], -math.inf
    if 0 < sampling.top_k <= len(descending):
        least = descending[sampling.top_k - 1]
    if sampling.top_p < 1.0:
        weights = [math.exp(value - best) for value in descending if value >= least]
        reached, total = 0.0, sum(weights)
        for value, weight in zip(descending, weights, strict=False):
            reached += weight
            if reached >= sampling.top_p * total:
                least = max(least, value)
                break
    return max(least, best + math.log(sampling.min_p)) if sampling.min_p > 0 else least
