"""Draws tokens on the host with numpy, one row at a time.

On a CPU this is faster than `device_sampler`, because it computes noise for few tokens of the vocabulary.
"""

from functools import lru_cache

import numpy as np

from baton.engine.constraints.token_bits import Bits, flags_of, ids_of
from baton.engine.state.step import SampleRequest
from baton.model.sampling.sampling_noise import GOLDEN, MIX_1, MIX_2, noise_key

_TOP_P_FIRST_GUESS = 256
_FEW_TOKENS = 8_192
"""Vocabulary size up to which noise is computed for all tokens. Selecting candidates would take as long."""
_RARE_NOISE = 7.0
"""Noise above this value is rare: one token in 1,100."""
_RARE_BITS = np.uint64(int(np.exp(-np.exp(-_RARE_NOISE)) * 2.0**53) << 11)
"""Hash values from here on give rare noise."""
_ROUNDING = 1e-3
"""Upper bound on the rounding errors of logarithms, sums and `_RARE_BITS`."""


def noise(seed: int, sample_index: int, position: int, vocab_size: int) -> np.ndarray:
    """Return standard Gumbel noise for each token id, float64 [vocab_size]."""
    return _gumbel(_bits(noise_key(seed, sample_index, position), _offsets(vocab_size)))


@lru_cache(maxsize=2)
def _offsets(vocab_size: int) -> np.ndarray:
    offsets = _offsets_of(np.arange(vocab_size, dtype=np.uint64))
    offsets.flags.writeable = False
    return offsets


def _offsets_of(token_ids: np.ndarray) -> np.ndarray:
    """Return the distance of each token id's splitmix64 state from its seed, uint64."""
    offsets: np.ndarray = (token_ids + np.uint64(1)) * np.uint64(GOLDEN)
    return offsets


def _bits(key: int, offsets: np.ndarray) -> np.ndarray:
    """Return splitmix64 seeded with `key`, uint64 at each offset. Source: Steele et al. 2014."""
    x = offsets + np.uint64(key)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(MIX_1)
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= np.uint64(MIX_2)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


def _gumbel(bits: np.ndarray) -> np.ndarray:
    """Turn the top 53 bits into u in (0, 1) and return -log(-log(u))."""
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    gumbel: np.ndarray = -np.log(-np.log(uniform))
    return gumbel


def processed_logits(logits: np.ndarray, request: SampleRequest) -> np.ndarray:
    """Return logits after bias, penalties and bans, in this order, as a new array, float64 [vocab_size].

    The repetition penalty counts prompt and outputs; presence and frequency penalties count outputs only.
    Raises IndexError for a token id outside the vocabulary.
    """
    sampling = request.sampling
    processed = logits.astype(np.float64)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        np.add.at(processed, np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float64))
    if sampling.has_penalties:
        history = np.array(request.tokens_before, dtype=np.int64)
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(history)
            values = processed[seen]
            processed[seen] = np.where(
                values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
            )
        outputs, counts = np.unique(history[request.num_prompt_tokens :], return_counts=True)
        processed[outputs] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if request.banned_token_ids:
        processed[np.array(request.banned_token_ids, dtype=np.int64)] = -np.inf
    return processed


def kept_token_ids(scaled: np.ndarray, request: SampleRequest) -> np.ndarray | None:
    """Return the ids that top-k, then top-p, then min-p keep, or None for all of them.

    `scaled`: processed logits / temperature. Each rule is a threshold on the logit, so tokens with equal
    logits are all kept or all dropped. The vocabulary is sorted only as far as top-p needs.
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
    """Return the lowest logit of the smallest set of most likely tokens whose probability reaches `top_p`."""
    weights = np.exp(scaled - scaled.max())
    wanted = top_p * weights.sum()
    count = min(_TOP_P_FIRST_GUESS, scaled.shape[0])
    while True:
        top = np.sort(np.partition(scaled, scaled.shape[0] - count)[scaled.shape[0] - count :])[::-1]
        reached = np.searchsorted(np.cumsum(np.exp(top - top[0])), wanted)
        if reached < count or count == scaled.shape[0]:
            return float(top[min(int(reached), count - 1)])
        count = min(count * 8, scaled.shape[0])


def _perturbed(
    processed: np.ndarray, request: SampleRequest, sample_index: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return (candidate ids in ascending order, or None for all; their logits plus noise).

    The candidates always include the kept token with the highest sum.
    """
    scaled = processed / request.sampling.temperature
    ids = kept_token_ids(scaled, request)
    key = noise_key(request.sampling.seed, sample_index, request.position)
    if ids is not None:
        return ids, scaled[ids] + _gumbel(_bits(key, _offsets_of(ids.astype(np.uint64))))
    bits = _bits(key, _offsets(scaled.shape[0]))
    if scaled.shape[0] <= _FEW_TOKENS:
        return None, scaled + _gumbel(bits)
    ids = _candidates(scaled, bits)
    return ids, scaled[ids] + _gumbel(bits[ids])


def _candidates(scaled: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Return ids, ascending, that include the token with the highest logit plus noise.

    This saves computing the logarithms of all noise, which took most of the time of a draw. First come all
    tokens with rare noise and the most likely token. Without rare noise, a token can only beat the best of
    them if its logit is close to it.
    """
    first = np.append(np.flatnonzero(bits >= _RARE_BITS), scaled.argmax())
    best = (scaled[first] + _gumbel(bits[first])).max()
    near = np.flatnonzero(scaled >= best - _RARE_NOISE - _ROUNDING)
    found: np.ndarray = np.union1d(first, near)
    return found


def draw(logits: np.ndarray, request: SampleRequest, allowed: Bits | None = None) -> tuple[int, ...] | None:
    """Return one token id for each of the request's samples, or None if no token can be drawn.

    allowed: the tokens that a constrained request may draw.
    Of equal values the lowest id wins. Token ids that the request names must exist.
    """
    sampling = request.sampling
    if allowed is not None and not (sampling.logit_bias or sampling.has_penalties):  # bans are in `allowed`
        ids = ids_of(allowed)
        if sampling.is_greedy or len(ids) <= _FEW_TOKENS:
            return _draw_among(ids, logits[ids].astype(np.float64), request)
    processed = processed_logits(logits, request)
    if allowed is not None:
        processed[~flags_of(allowed, processed.shape[0])] = -np.inf
    if not processed.max() > -np.inf:
        return None
    if sampling.is_greedy:
        return (int(processed.argmax()),) * len(request.sample_indices)
    drawn = []
    for sample_index in request.sample_indices:
        ids_or_all, values = _perturbed(processed, request, sample_index)
        best = int(values.argmax())
        drawn.append(best if ids_or_all is None else int(ids_or_all[best]))
    return tuple(drawn)


def _draw_among(ids: np.ndarray, processed: np.ndarray, request: SampleRequest) -> tuple[int, ...] | None:
    """Draw from few tokens, as `draw` does. `processed` has their logits."""
    if not processed.max() > -np.inf:
        return None
    if request.sampling.is_greedy:
        return (int(ids[processed.argmax()]),) * len(request.sample_indices)
    scaled = processed / request.sampling.temperature
    kept = kept_token_ids(scaled, request)
    if kept is not None:
        ids, scaled = ids[kept], scaled[kept]
    offsets = _offsets_of(ids.astype(np.uint64))
    keys = [noise_key(request.sampling.seed, index, request.position) for index in request.sample_indices]
    return tuple(int(ids[(scaled + _gumbel(_bits(key, offsets))).argmax()]) for key in keys)
