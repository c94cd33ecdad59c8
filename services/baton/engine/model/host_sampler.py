"""Drawing on the host, one row at a time, in numpy: on a CPU it looks at less of a vocabulary than a pass over all rows would."""

import numpy as np

from baton.engine.model.noise import GOLDEN, MIX_1, MIX_2, noise_key
from baton.engine.step import SampleRequest

_TOP_P_FIRST_GUESS = 256


def noise(seed: int, sample_index: int, position: int, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise for each token id, float64 [vocab_size]."""
    return _noise_of(noise_key(seed, sample_index, position), np.arange(vocab_size, dtype=np.uint64))


def _noise_of(key: int, token_ids: np.ndarray) -> np.ndarray:
    """splitmix64 seeded with `key`, taken at each token id: top 53 bits as u in (0, 1), then -log(-log(u)). Source: Steele et al. 2014."""
    x = np.uint64(key) + (token_ids + np.uint64(1)) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    x ^= x >> np.uint64(31)
    uniform = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    gumbel: np.ndarray = -np.log(-np.log(uniform))
    return gumbel


def adjusted_logits(logits: np.ndarray, request: SampleRequest) -> np.ndarray:
    """Logits after bias, penalties and bans, in this order, float64 [vocab_size]; a new array.

    The repetition penalty counts prompt and outputs, presence and frequency outputs only. Raises IndexError for an unknown id.
    """
    sampling = request.sampling
    adjusted = logits.astype(np.float64)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        np.add.at(adjusted, np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float64))
    if sampling.has_penalties:
        history = np.array(request.history, dtype=np.int64)
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(history)
            values = adjusted[seen]
            adjusted[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        outputs, counts = np.unique(history[request.num_prompt_tokens :], return_counts=True)
        adjusted[outputs] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if request.banned_token_ids:
        adjusted[np.array(request.banned_token_ids, dtype=np.int64)] = -np.inf
    return adjusted


def kept_token_ids(scaled: np.ndarray, request: SampleRequest) -> np.ndarray | None:
    """Ids that top-k, then top-p, then min-p keep of `scaled` = adjusted logits / temperature; None: all of them.

    Each is a lower bound on the logit, so that which of two equal logits is kept does not depend on an order. The vocabulary is sorted
    only as far as top-p needs.
    """
    sampling, vocab_size = request.sampling, scaled.shape[0]
    least = -np.inf
    if 0 < sampling.top_k < vocab_size:
        least = np.partition(scaled, vocab_size - sampling.top_k)[vocab_size - sampling.top_k]
    if sampling.top_p < 1.0:
        least = max(least, _top_p_bound(scaled[scaled >= least], sampling.top_p))
    if sampling.min_p > 0.0:
        least = max(least, scaled.max() + np.log(sampling.min_p))
    return None if least == -np.inf else np.nonzero(scaled >= least)[0]


def _top_p_bound(scaled: np.ndarray, top_p: float) -> float:
    """The least logit of the smallest set of most likely tokens whose probability reaches `top_p`."""
    weights = np.exp(scaled - scaled.max())
    wanted = top_p * weights.sum()
    count = min(_TOP_P_FIRST_GUESS, scaled.shape[0])
    while True:
        top = np.sort(np.partition(scaled, scaled.shape[0] - count)[scaled.shape[0] - count :])[::-1]
        reached = np.searchsorted(np.cumsum(np.exp(top - top[0])), wanted)
        if reached < count or count == scaled.shape[0]:
            return float(top[min(int(reached), count - 1)])
        count = min(count * 8, scaled.shape[0])


def _perturbed(adjusted: np.ndarray, request: SampleRequest, sample_index: int) -> tuple[np.ndarray | None, np.ndarray]:
    """(kept ids or None for all, their perturbed logits)."""
    scaled = adjusted / request.sampling.temperature
    ids = kept_token_ids(scaled, request)
    key = noise_key(request.sampling.seed, sample_index, request.position)
    if ids is None:
        return None, scaled + _noise_of(key, np.arange(scaled.shape[0], dtype=np.uint64))
    return ids, scaled[ids] + _noise_of(key, ids.astype(np.uint64))


def draw(logits: np.ndarray, request: SampleRequest) -> tuple[int, ...] | None:
    """One token id for each of the request's samples, the lowest id of equals; None if there is no token to draw. The token ids that the
    request names must exist."""
    adjusted = adjusted_logits(logits, request)
    if not adjusted.max() > -np.inf:
        return None
    if request.sampling.is_greedy:
        return (int(adjusted.argmax()),) * len(request.sample_indices)
    drawn = []
    for sample_index in request.sample_indices:
        ids, values = _perturbed(adjusted, request, sample_index)
        best = int(values.argmax())
        drawn.append(best if ids is None else int(ids[best]))
    return tuple(drawn)
