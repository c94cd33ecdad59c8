"""Drawing where the logits are, all rows of a kind at once, without waiting for the device: for a GPU.
`host_sampler.py` draws the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from baton.engine.state.step import SampleRequest
from baton.model.device.async_copy import upload
from baton.model.sampling.logits_processors import process_logits
from baton.model.sampling.sampling_noise import GOLDEN, MIX_1, MIX_2, noise_key

_MASK = (1 << 64) - 1
_MAX_VALUES = 1 << 22
"""Of float64 in one array, of which there are eight or so at a time."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the device: token_ids, one for each of the requests' samples; have_choice [len(requests)]: whether
    there was a token to draw."""

    token_ids: torch.Tensor
    have_choice: torch.Tensor


def draw(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Drawn:
    """logits [len(requests), vocab_size], float32. The token ids that requests name must exist, see
    `adjusting.unknown_token_id`."""
    of_row = np.cumsum([0, *(len(request.sample_indices) for request in requests)])
    token_ids = torch.zeros(int(of_row[-1]), dtype=torch.int64, device=logits.device)
    have_choice = torch.ones(len(requests), dtype=torch.bool, device=logits.device)
    for rows in _chunks(requests, logits.shape[1]):
        index = upload(np.array(rows), logits.device)
        asking = [requests[row] for row in rows]
        adjusted = process_logits(logits[index].double(), asking)
        have_choice[index] = adjusted.amax(dim=-1) > -torch.inf
        places = np.concatenate([np.arange(of_row[row], of_row[row + 1]) for row in rows])
        token_ids[upload(places, logits.device)] = _best(adjusted, asking)
    return Drawn(token_ids, have_choice)


def _chunks(requests: Sequence[SampleRequest], vocab_size: int) -> Iterator[list[int]]:
    """Rows that are drawn in the same way, not too many at a time."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for row, request in enumerate(requests):
        kinds.setdefault((request.sampling.is_greedy, _is_truncated(request)), []).append(row)
    most = max(1, _MAX_VALUES // vocab_size)
    for rows in kinds.values():
        chunk, num_samples = list[int](), 0
        for row in rows:
            more = len(requests[row].sample_indices)
            if chunk and num_samples + more > most:
                yield chunk
                chunk, num_samples = [], 0
            chunk.append(row)
            num_samples += more
        yield chunk


def _best(adjusted: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """One token id for each sample, of requests of one kind; the lowest id of equals. adjusted
    [len(requests), vocab_size], float64, is written over."""
    device = adjusted.device
    owners = upload(np.repeat(np.arange(len(requests)), [len(request.sample_indices) for request in requests]), device)
    if requests[0].sampling.is_greedy:
        return adjusted.argmax(dim=-1)[owners]
    scaled = adjusted.div_(upload(np.array([[request.sampling.temperature] for request in requests]), device))
    if _is_truncated(requests[0]):
        scaled.masked_fill_(scaled < least_kept(scaled, requests), -torch.inf)
    keys = [
        noise_key(request.sampling.seed, index, request.position)
        for request in requests
        for index in request.sample_indices
    ]
    return noise(keys, scaled.shape[1], device).add_(scaled[owners]).argmax(dim=-1)


def _is_truncated(request: SampleRequest) -> bool:
    sampling = request.sampling
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def least_kept(scaled: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """What top-k, then top-p, then min-p leave of `scaled` = adjusted logits / temperature, float64
    [len(requests), vocab_size], as a lower bound [len(requests), 1]: so which of two equal logits is kept
    does not depend on an order."""
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
    """As `host_sampler.noise`, float64 [len(keys), vocab_size], for keys of `noise_key`."""
    signed = np.array(keys, dtype=np.uint64).view(np.int64)  # torch has no arithmetic of unsigned numbers
    bits = _strides(vocab_size, device) + upload(signed[:, None], device)
    spare = torch.empty_like(bits)
    bits.bitwise_xor_(_shifted(bits, 30, spare)).mul_(_signed(MIX_1))
    bits.bitwise_xor_(_shifted(bits, 27, spare)).mul_(_signed(MIX_2))
    bits.bitwise_xor_(_shifted(bits, 31, spare))
    uniform = _shifted(bits, 11, spare).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, by: int, out: torch.Tensor) -> torch.Tensor:
    """To the right without the sign."""
    return torch.bitwise_right_shift(bits, by, out=out).bitwise_and_(_MASK >> by)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


@lru_cache(maxsize=4)
def _strides(vocab_size: int, device: torch.device) -> torch.Tensor:
    """How far each token id is from a key, int64 [1, vocab_size]."""
    return (torch.arange(1, vocab_size + 1, device=device) * _signed(GOLDEN))[None]
