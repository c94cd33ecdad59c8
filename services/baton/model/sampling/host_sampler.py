"""Drawing on the host, one row at a time, in numpy: on a CPU it looks at less of a vocabulary than a pass
over all rows would."""

from functools import lru_cache

import numpy as np

from baton.engine.state.step import SampleRequest
from baton.model.sampling.sampling_noise import GOLDEN, MIX_1, MIX_2, noise_key

_TOP_P_FIRST_GUESS = 256
_FEW_TOKENS = 8_192
"""Of a vocabulary up to this size, all noise is worked out: looking for candidates would take as long."""
_RARE_NOISE = 7.0
"""One token in 1,100 has more."""
_RARE_BITS = np.uint64(int(np.exp(-np.exp(-_RARE_NOISE)) * 2.0**53) << 11)
"""From these 64 bits on, noise is rare."""
_ROUNDING = 1e-3
"""More than logarithms, sums and the bound on bits can be off."""


def noise(seed: int, sample_index: int, position: int, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise for each token id, float64 [vocab_size]."""
    return _noise_of(_bits(noise_key(seed, sample_index, position), _offsets(vocab_size)))


@lru_cache(maxsize=2)
def _offsets(vocab_size: int) -> np.ndarray:
    offsets = _offsets_of(np.arange(vocab_size, dtype=np.uint64))
    offsets.flags.writeable = False
    return offsets


def _offsets_of(token_ids: np.ndarray) -> np.ndarray:
    """How far splitmix64's state is from its seed at each token id, uint64."""
    offsets: np.ndarray = (token_ids + np.uint64(1)) * np.uint64(GOLDEN)
    return offsets


def _bits(key: int, offsets: np.ndarray) -> np.ndarray:
    """splitmix64 seeded with `key`, uint64 at each offset. Source: Steele et al. 2014."""
    x = offsets + np.uint64(key)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(MIX_1)
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= np.uint64(MIX_2)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


def _noise_of(bits: np.ndarray) -> np.ndarray:
    """The top 53 bits as u in (0, 1), then -log(-log(u))."""
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    gumbel: np.ndarray = -np.log(-np.log(uniform))
    return gumbel


def adjusted_logits(logits: np.ndarray, request: SampleRequest) -> np.ndarray:
    """Logits after bias, penalties and bans, in this order, float64 [vocab_size]; a new array.

    The repetition penalty counts prompt and outputs, presence and frequency outputs only. Raises IndexError
    for an unknown id.
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
            adjusted[seen] = np.where(
                values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
            )
        outputs, counts = np.unique(history[request.num_prompt_tokens :], return_counts=True)
        adjusted[outputs] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if request.banned_token_ids:
        adjusted[np.array(request.banned_token_ids, dtype=np.int64)] = -np.inf
    return adjusted


def kept_token_ids(scaled: np.ndarray, request: SampleRequest) -> np.ndarray | None:
    """Ids that top-k, then top-p, then min-p keep of `scaled` = adjusted logits / temperature; None: all of
    them.

    Each is a lower bound on the logit, so that which of two equal logits is kept does not depend on an order.
    The vocabulary is sorted only as far as top-p needs.
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
    """(ids in order, or None for all; their perturbed logits): of what is kept, at least the best is
    there."""
    scaled = adjusted / request.sampling.temperature
    ids = kept_token_ids(scaled, request)
    key = noise_key(request.sampling.seed, sample_index, request.position)
    if ids is not None:
        return ids, scaled[ids] + _noise_of(_bits(key, _offsets_of(ids.astype(np.uint64))))
    bits = _bits(key, _offsets(scaled.shape[0]))
    if scaled.shape[0] <= _FEW_TOKENS:
        return None, scaled + _noise_of(bits)
    ids = _candidates(scaled, bits)
    return ids, scaled[ids] + _noise_of(bits[ids])


def _candidates(scaled: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Ids, in order, among which the best one is: the logarithms of all noise took most of a draw. First
    those with rare noise, and the likeliest one; who has no rare noise can beat their best only from near
    by."""
    first = np.append(np.flatnonzero(bits >= _RARE_BITS), scaled.argmax())
    best = (scaled[first] + _noise_of(bits[first])).max()
    near = np.flatnonzero(scaled >= best - _RARE_NOISE - _ROUNDING)
    found: np.ndarray = np.union1d(first, near)
    return found


def draw(logits: np.ndarray, request: SampleRequest) -> tuple[int, ...] | None:
    """One token id for each of the request's samples, the lowest id of equals; None if there is no token to
    draw. The token ids that the request names must exist."""
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
