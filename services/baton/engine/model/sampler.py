"""Keyed Gumbel sampling: `argmax(logits / temperature + g)` over what top-k, top-p and min-p keep; g from a counter-based hash of (seed,
sample_index, position, token id).

The same request draws the same tokens wherever and however often it runs, and rounding noise in the logits flips a token as rarely as in
greedy decoding. Everything after the model's float32 logits is float64, so that it adds no noise of its own. `SAMPLER_VERSION` in
`core/kv_layout.py` changes with anything here that changes a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.errors import Code, Failure, Reason
from baton.core.request import TokenLogprobs
from baton.engine.step import SampledToken, SampleRequest

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TOP_P_FIRST_GUESS = 256


def _mix(x: int) -> int:
    """splitmix64's finalizer."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """64 bits for one token to be drawn; `position` counts from the first prompt token."""
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key ^ sample_index) + _GOLDEN & _MASK)
    return _mix((key ^ position) + _GOLDEN & _MASK)


def noise(seed: int, sample_index: int, position: int, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise for each token id, float64 [vocab_size]."""
    return _noise_of(noise_key(seed, sample_index, position), np.arange(vocab_size, dtype=np.uint64))


def _noise_of(key: int, token_ids: np.ndarray) -> np.ndarray:
    """splitmix64 seeded with `key`, taken at each token id: top 53 bits as u in (0, 1), then -log(-log(u)). Source: Steele et al. 2014."""
    x = np.uint64(key) + (token_ids + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
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


def draw(logits: np.ndarray, request: SampleRequest) -> tuple[int, ...]:
    """One token id for each of the request's samples; the lowest id of equals. Raises ValueError if no token is left to draw."""
    adjusted = adjusted_logits(logits, request)
    if not adjusted.max() > -np.inf:
        raise ValueError("bias and bans leave no token to draw")
    if request.sampling.is_greedy:
        return (int(adjusted.argmax()),) * len(request.sample_indices)
    drawn = []
    for sample_index in request.sample_indices:
        ids, values = _perturbed(adjusted, request, sample_index)
        best = int(values.argmax())
        drawn.append(best if ids is None else int(ids[best]))
    return tuple(drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """`samples` by sequence; a sequence whose logits or request were at fault is in `failures` instead."""

    samples: Mapping[int, tuple[SampledToken, ...]]
    failures: Mapping[int, Failure]


def numerical_error(what: str) -> Failure:
    """NaN or infinity where numbers should be: this sequence ends, the others go on."""
    return Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message=f"the model computed {what} for this request")


def sample(logits: torch.Tensor, requests: Sequence[tuple[int, SampleRequest]]) -> SampledStep:
    """Draw every sequence's tokens. logits [len(requests), vocab_size], any float dtype; requests: (seq_id, request), a row each."""
    failures: dict[int, Failure] = {}
    drawn: dict[int, tuple[int, ...]] = {}
    logits = logits.float()
    best_logits, best_ids = logits.max(dim=-1)  # NaN wins a maximum
    finite = torch.isfinite(best_logits).tolist()
    greedy_ids = best_ids.tolist()
    for row, (seq_id, request) in enumerate(requests):
        if not finite[row]:
            failures[seq_id] = numerical_error("logits that are not numbers")
        elif _is_plain_greedy(request):
            drawn[seq_id] = (greedy_ids[row],) * len(request.sample_indices)
        else:
            try:
                drawn[seq_id] = draw(logits[row].cpu().numpy(), request)
            except (IndexError, ValueError) as error:
                failures[seq_id] = Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=f"cannot sample: {error}")
    logprobs = _logprobs(
        logits, [(row, seq_id, request, drawn[seq_id]) for row, (seq_id, request) in enumerate(requests) if seq_id in drawn]
    )
    samples = {
        seq_id: tuple(
            SampledToken(sample_index=index, token_id=token, logprobs=logprobs[seq_id][i] if seq_id in logprobs else None)
            for i, (index, token) in enumerate(zip(request.sample_indices, drawn[seq_id], strict=True))
        )
        for seq_id, request in requests
        if seq_id in drawn
    }
    return SampledStep(samples=samples, failures=failures)


def _is_plain_greedy(request: SampleRequest) -> bool:
    sampling = request.sampling
    return sampling.is_greedy and not (sampling.has_penalties or sampling.logit_bias or request.banned_token_ids)


def _logprobs(
    logits: torch.Tensor, wanted: Sequence[tuple[int, int, SampleRequest, tuple[int, ...]]]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Of the model's own distribution, float32, for (row, seq_id, request, drawn ids) that ask for them; one entry for each drawn id."""
    wanted = [entry for entry in wanted if entry[2].sampling.num_logprobs is not None]
    if not wanted:
        return {}
    logprobs = torch.log_softmax(logits[[row for row, *_ in wanted]], dim=-1)
    count = min(max(request.sampling.num_logprobs or 0 for _, _, request, _ in wanted), logits.shape[-1])
    top_values, top_ids = (part.tolist() for part in logprobs.topk(count, dim=-1))
    found = {}
    for i, (_, seq_id, request, ids) in enumerate(wanted):
        num = request.sampling.num_logprobs or 0
        top = tuple(zip(top_ids[i][:num], top_values[i][:num], strict=True))
        chosen = logprobs[i, list(ids)].tolist()
        found[seq_id] = tuple(TokenLogprobs(logprob=value, top=top) for value in chosen)
    return found
