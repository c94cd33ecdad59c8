"""Draws tokens on the device, for a GPU: all rows of a kind together and without waiting for the device.

`host_sampler.py` draws the same tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch

from baton.engine.constraints.token_bits import Bits
from baton.engine.state.step import SampleRequest
from baton.model.device.async_copy import upload
from baton.model.sampling.logits_processors import process_logits
from baton.model.sampling.sampling_noise import GOLDEN, MIX_1, MIX_2, noise_key

_MASK = (1 << 64) - 1
NO_BITS: Mapping[int, Bits] = MappingProxyType({})
MAX_VALUES = 1 << 22
"""Limit of float64 values in one array. About eight such arrays exist at a time."""


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Drawn tokens, on the device.

    token_ids: one for each sample of the requests.
    have_choice: bool [len(requests)], False if no token was left to draw.
    """

    token_ids: torch.Tensor
    have_choice: torch.Tensor


def draw(
    logits: torch.Tensor,
    requests: Sequence[SampleRequest],
    allowed: Mapping[int, Bits] = NO_BITS,
    max_values: int = MAX_VALUES,
) -> DrawnTokens:
    """Draw the tokens of all requests. `logits`: float32 [len(requests), vocab_size].

    allowed: the tokens that constrained requests may draw, by row.
    max_values: limit of float64 values in one array.
    Token ids that requests name must exist, see `logits_processors.unknown_token_id`.
    """
    first_draw = np.cumsum([0, *(len(request.sample_indices) for request in requests)])
    token_ids = torch.zeros(int(first_draw[-1]), dtype=torch.int64, device=logits.device)
    have_choice = torch.ones(len(requests), dtype=torch.bool, device=logits.device)
    for rows in _chunks(requests, max(1, max_values // logits.shape[1])):
        index = upload(np.array(rows), logits.device)
        chunk_requests = [requests[row] for row in rows]
        processed = process_logits(logits[index].double(), chunk_requests)
        forbid(processed, {place: allowed[row] for place, row in enumerate(rows) if row in allowed})
        have_choice[index] = processed.amax(dim=-1) > -torch.inf
        places = np.concatenate([np.arange(first_draw[row], first_draw[row + 1]) for row in rows])
        token_ids[upload(places, logits.device)] = _best(processed, chunk_requests)
    return DrawnTokens(token_ids, have_choice)


def forbid(processed: torch.Tensor, allowed: Mapping[int, Bits]) -> None:
    """Set the logits of all tokens that are not in `allowed` to -inf in the rows that it has, in place."""
    if not allowed:
        return
    device, vocab_size = processed.device, processed.shape[1]
    rows = upload(np.fromiter(allowed, dtype=np.int64), device)
    words = upload(np.stack(list(allowed.values())).view(np.int32), device)
    flags = torch.bitwise_right_shift(words[:, :, None], torch.arange(32, dtype=torch.int32, device=device))
    is_forbidden = flags.bitwise_and_(1).reshape(len(allowed), -1)[:, :vocab_size] == 0
    processed[rows] = processed[rows].masked_fill_(is_forbidden, -torch.inf)


def _chunks(requests: Sequence[SampleRequest], max_samples: int) -> Iterator[list[int]]:
    """Yield lists of rows that are drawn in the same way, of at most `max_samples` samples or one row."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for row, request in enumerate(requests):
        kinds.setdefault((request.sampling.is_greedy, _is_truncated(request)), []).append(row)
    for rows in kinds.values():
        chunk, num_samples = list[int](), 0
        for row in rows:
            more = len(requests[row].sample_indices)
            if chunk and num_samples + more > max_samples:
                yield chunk
                chunk, num_samples = [], 0
            chunk.append(row)
            num_samples += more
        yield chunk


def _best(processed: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Return one token id for each sample of requests of one kind; of equal values the lowest id.

    `processed`: float64 [len(requests), vocab_size]; overwritten.
    """
    device = processed.device
    owners = upload(np.repeat(np.arange(len(requests)), [len(request.sample_indices) for request in requests]), device)
    if requests[0].sampling.is_greedy:
        return processed.argmax(dim=-1)[owners]
    scaled = processed.div_(upload(np.array([[request.sampling.temperature] for request in requests]), device))
    if _is_truncated(requests[0]):
        scaled.masked_fill_(scaled < truncation_threshold(scaled, requests), -torch.inf)
    keys = [
        noise_key(request.sampling.seed, index, request.position)
        for request in requests
        for index in request.sample_indices
    ]
    return noise(keys, scaled.shape[1], device).add_(scaled[owners]).argmax(dim=-1)


def _is_truncated(request: SampleRequest) -> bool:
    sampling = request.sampling
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def truncation_threshold(scaled: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Return the lowest scaled logit that top-k, then top-p, then min-p keep, for each row.

    `scaled`: float64 [len(requests), vocab_size], processed logits / temperature. The result is
    [len(requests), 1]. Because it is a threshold, tokens with equal logits are all kept or all dropped.
    """
    vocab_size, device = scaled.shape[1], scaled.device
    with np.errstate(divide="ignore"):
        log_min_p = upload(np.log([[request.sampling.min_p] for request in requests]), device)
    top_p = upload(np.array([[request.sampling.top_p] for request in requests]), device)
    top_k = upload(np.array([[min(request.sampling.top_k, vocab_size)] for request in requests]), device)
    top = scaled.sort(dim=-1, descending=True).values
    best, nothing = top[:, :1], torch.full_like(top[:, :1], -torch.inf)
    least = torch.where(top_k > 0, top.gather(1, (top_k - 1).clamp_(min=0)), nothing)
    mass = torch.where(top >= least, (top - best).exp_(), 0.0).cumsum_(dim=-1)
    reached = (mass < top_p * mass[:, -1:]).sum(dim=-1, keepdim=True)
    least = torch.maximum(least, torch.where(top_p < 1.0, top.gather(1, reached.clamp_(max=vocab_size - 1)), nothing))
    return torch.maximum(least, best + log_min_p)


def noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return Gumbel noise, float64 [len(keys), vocab_size]; equal to `host_sampler.noise`.

    `keys`: from `noise_key`.
    """
    signed = np.array(keys, dtype=np.uint64).view(np.int64)  # torch has no unsigned 64-bit arithmetic
    bits = _strides(vocab_size, device) + upload(signed[:, None], device)
    spare = torch.empty_like(bits)
    bits.bitwise_xor_(_shifted(bits, 30, spare)).mul_(_signed(MIX_1))
    bits.bitwise_xor_(_shifted(bits, 27, spare)).mul_(_signed(MIX_2))
    bits.bitwise_xor_(_shifted(bits, 31, spare))
    uniform = _shifted(bits, 11, spare).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, by: int, out: torch.Tensor) -> torch.Tensor:
    """Shift right without sign extension."""
    return torch.bitwise_right_shift(bits, by, out=out).bitwise_and_(_MASK >> by)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


@lru_cache(maxsize=4)
def _strides(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return the distance of each token id's splitmix64 state from its key, int64 [1, vocab_size]."""
    return (torch.arange(1, vocab_size + 1, device=device) * _signed(GOLDEN))[None]
