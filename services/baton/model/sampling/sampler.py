"""Samples tokens with keyed Gumbel noise: `argmax(logits / temperature + g)`, after truncation.

Truncation is top-k, top-p and min-p. The noise g is a hash of (seed, sample_index, position, token id). So
the same request draws the same tokens wherever and however often it runs, and rounding errors in the logits
change a token as rarely as in greedy decoding. Everything after the model's float32 logits is float64, so
that it adds no error of its own. Logits are changed in this order: bias, penalties, all rules that forbid
tokens (`min_tokens`, grammar, allowed tokens, bad words), temperature, truncation. Increase `SAMPLER_VERSION`
in `core/kv/kv_layout.py` if a change here or in the modules that draw changes a token. Nothing waits for the
device before `PendingSamples.result`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from baton.core.errors import Code, Failure, Reason
from baton.core.request import TokenLogprobs
from baton.engine.constraints.compiled_grammar import no_token_left
from baton.engine.constraints.token_bits import Bits
from baton.engine.constraints.token_constraints import NO_MASKS, TokenMasks
from baton.engine.state.draft_rows import RowRequests
from baton.engine.state.step import SampledToken, SampleRequest
from baton.model.device.async_copy import download, upload
from baton.model.sampling import device_sampler, host_sampler
from baton.model.sampling.best_tokens import FindBest, find_best
from baton.model.sampling.logits_processors import unknown_token_id

_NO_ROWS = np.empty(0, dtype=np.intp)
Draw = Callable[[torch.Tensor, Sequence[SampleRequest], Mapping[int, Bits]], device_sampler.DrawnTokens]
"""Draws the tokens of requests from their float32 logits, [len(requests), vocab_size], and from the tokens
that constrained requests may draw, by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """Sampled tokens by sequence: of one with drafts, those up to the first that is not its draft.

    A sequence with faulty logits or an invalid request is in `failures` instead, and one whose mask was not
    ready in `deferred`.
    """

    samples: Mapping[int, tuple[SampledToken, ...]]
    failures: Mapping[int, Failure]
    deferred: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logprobs:
    """Logprobs of the rows that ask for them, on the host once the device is done.

    chosen: [draws of these rows].
    top_values, top_ids: [number of rows, most logprobs that a row asks for].
    """

    rows: Sequence[int]
    chosen: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSamples:
    """Tokens that the device is drawing.

    row_requests: the requests, by row.
    draws_of_row: the range of draws of each row.
    refused: failures of invalid requests, by row.
    deferred: rows whose mask was not ready.
    token_ids: int64 [num_draws], on the device; row after row, each request's samples in order. Arbitrary for
    a row that fails.
    found: token ids, then for each row if its logits are finite, then if it has a token to draw; on the host
    once the device is done.
    """

    row_requests: RowRequests
    draws_of_row: Sequence[range]
    refused: Mapping[int, Failure]
    deferred: frozenset[int]
    token_ids: torch.Tensor
    found: torch.Tensor
    logprobs: _Logprobs | None

    def result(self) -> SampledStep:
        """Return the samples. Call it after the device is done."""
        found, num_rows = self.found.tolist(), len(self.row_requests)
        are_finite, have_choice = found[-2 * num_rows : -num_rows], found[-num_rows:]
        logprobs = self._logprobs_of_draws()
        failures: dict[int, Failure] = {}
        samples: dict[int, tuple[SampledToken, ...]] = {}
        deferred: set[int] = set()
        continues, counts = False, True
        for row, (seq_id, request) in enumerate(self.row_requests):
            is_first, continues = not continues, bool(request.drafts)
            if not (is_first or counts):
                continue  # a draft before it is wrong, or its token could not be drawn
            is_valid = are_finite[row] and have_choice[row] and row not in self.refused
            failure = None if is_valid else self._failure(row, is_finite=are_finite[row], has_choice=have_choice[row])
            counts = failure is None and row not in self.deferred
            if counts:
                tokens = tuple(
                    [
                        SampledToken(sample_index=index, token_id=found[draw], logprobs=logprobs.get(draw))
                        for index, draw in zip(request.sample_indices, self.draws_of_row[row], strict=True)
                    ]
                )
                samples[seq_id] = tokens if is_first else samples[seq_id] + tokens
                counts = continues and tokens[0].token_id == request.drafts[0]
            elif is_first and failure is not None:  # after a draft, the next step finds the failure
                failures[seq_id] = failure
            elif is_first:
                deferred.add(seq_id)
        return SampledStep(samples=samples, failures=failures, deferred=frozenset(deferred))

    def _failure(self, row: int, *, is_finite: bool, has_choice: bool) -> Failure | None:
        """Return why no token can be drawn for a row. None if it can, or if its mask is not ready."""
        if not is_finite:
            return numerical_error("NaN or infinite logits")
        if row in self.refused:
            return self.refused[row]
        if row not in self.deferred and not has_choice:
            return no_token_left("logit_bias and min_tokens leave no token; relax one of them")
        return None

    def _logprobs_of_draws(self) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        chosen = iter(self.logprobs.chosen.tolist())
        found: dict[int, TokenLogprobs] = {}
        for row, ids, values in zip(
            self.logprobs.rows, self.logprobs.top_ids.tolist(), self.logprobs.top_values.tolist(), strict=True
        ):
            num = self.row_requests[row][1].sampling.num_logprobs or 0
            top = tuple(zip(ids[:num], values[:num], strict=True))
            found.update((draw, TokenLogprobs(logprob=next(chosen), top=top)) for draw in self.draws_of_row[row])
        return found


def sample(
    logits: torch.Tensor,
    row_requests: RowRequests,
    draw: Draw | None = None,
    *,
    masks: TokenMasks = NO_MASKS,
    find_best: FindBest = find_best,
) -> PendingSamples:
    """Start drawing the tokens of every row.

    logits: [len(row_requests), vocab_size], any float dtype.
    draw: draws the rows that are not greedy; None: the sampler for the device of `logits`.
    masks: of the constrained rows.
    find_best: finds the tokens of greedy rows. With `draw`, or on a GPU, it gets no masks, and the rows that
        have one are drawn like the others.
    """
    logits, device = logits.float(), logits.device
    draws_of_row = _draws_of(row_requests)
    is_on_host = device.type == "cpu" and draw is None
    masked, bits = _greedy_rows(row_requests, masks) if is_on_host else (_NO_ROWS, NO_MASKS.bits)
    best = find_best(logits, masked, bits)
    token_ids = best.token_ids
    if any(len(own) != 1 for own in draws_of_row):
        token_ids = token_ids[_owners(draws_of_row, device)]
    are_drawn = set(masked.tolist())
    special = [
        row
        for row, (_, request) in enumerate(row_requests)
        if not (_takes_best(request) and (row in are_drawn or not _is_restricted(request)))
    ]
    refused = {
        row: _cannot_sample(f"token id {unknown} is outside the vocabulary of {logits.shape[-1]} tokens")
        for row in special
        if (unknown := unknown_token_id(row_requests[row][1], logits.shape[-1])) is not None
    }
    refused.update(masks.failures)
    if rows := [row for row in special if row not in refused and row not in masks.deferred]:
        draw = draw or (_draw_on_host if device.type == "cpu" else device_sampler.draw)
        by_row = masks.by_row()
        allowed = {place: by_row[row] for place, row in enumerate(rows) if row in by_row}
        drawn = draw(_rows(logits, rows), [row_requests[row][1] for row in rows], allowed)
        token_ids[_index(chain.from_iterable(draws_of_row[row] for row in rows), device)] = drawn.token_ids
        best.have_choice[_index(rows, device)] = drawn.have_choice
    found = torch.cat((token_ids, best.are_finite.long(), best.have_choice.long()))
    logprobs = _logprobs(logits, row_requests, draws_of_row, token_ids)
    return PendingSamples(
        row_requests=row_requests,
        draws_of_row=draws_of_row,
        refused=refused,
        deferred=masks.deferred,
        token_ids=token_ids,
        found=download(found),
        logprobs=logprobs,
    )


def _greedy_rows(row_requests: RowRequests, masks: TokenMasks) -> tuple[npt.NDArray[np.intp], Bits]:
    """Return the rows with a mask that draw the most likely token, and their masks."""
    are_greedy = [_takes_best(row_requests[row][1]) for row in masks.rows]
    rows = np.array(masks.rows, dtype=np.intp)
    return (rows, masks.bits) if all(are_greedy) else (rows[are_greedy], masks.bits[are_greedy])


def _draw_on_host(
    logits: torch.Tensor, requests: Sequence[SampleRequest], allowed: Mapping[int, Bits]
) -> device_sampler.DrawnTokens:
    drawn: list[tuple[int, ...] | None] = []
    for row, (logits_row, request) in enumerate(zip(logits.numpy(), requests, strict=True)):
        if row and _follows_wrong_draft(requests[row - 1], drawn[-1], request):
            drawn.append((0,))  # not drawn: it will not count
        else:
            drawn.append(host_sampler.draw(logits_row, request, allowed.get(row)))
    found = [ids or (0,) * len(request.sample_indices) for ids, request in zip(drawn, requests, strict=True)]
    return device_sampler.DrawnTokens(
        torch.tensor(list(chain.from_iterable(found))), torch.tensor([ids is not None for ids in drawn])
    )


def _follows_wrong_draft(before: SampleRequest, drawn: tuple[int, ...] | None, request: SampleRequest) -> bool:
    """Return True if `request` is of the row after `before`, whose token is not the draft."""
    continues = bool(before.drafts) and before.history is request.history and before.position + 1 == request.position
    return continues and drawn != before.drafts[:1]


def numerical_error(what: str) -> Failure:
    """Return the failure of a sequence whose computation gave NaN or infinity. Other sequences continue."""
    return Failure(
        code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message=f"the model computed {what} for this request"
    )


def _cannot_sample(why: str) -> Failure:
    return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=f"cannot sample: {why}")


def _logprobs(
    logits: torch.Tensor, row_requests: RowRequests, draws_of_row: Sequence[range], token_ids: torch.Tensor
) -> _Logprobs | None:
    """Return logprobs of the model's own distribution, float32, for the rows that ask for them."""
    rows = [row for row, (_, request) in enumerate(row_requests) if request.sampling.num_logprobs is not None]
    if not rows:
        return None
    logprobs = torch.log_softmax(_rows(logits, rows), dim=-1)
    most = max(row_requests[row][1].sampling.num_logprobs or 0 for row in rows)
    top = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    drawn = token_ids[_index(chain.from_iterable(draws_of_row[row] for row in rows), logits.device)]
    chosen = logprobs[_owners([draws_of_row[row] for row in rows], logits.device), drawn]
    return _Logprobs(rows=rows, chosen=download(chosen), top_values=download(top.values), top_ids=download(top.indices))


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[_index(rows, logits.device)]


def _index(numbers: Iterable[int], device: torch.device) -> torch.Tensor:
    return upload(np.fromiter(numbers, dtype=np.int64), device)


def _owners(draws: Sequence[range], device: torch.device) -> torch.Tensor:
    """Return for each draw the index of its row among these."""
    return upload(np.repeat(np.arange(len(draws)), [len(own) for own in draws]), device)


def _draws_of(row_requests: RowRequests) -> list[range]:
    """Return the range of draws of each row."""
    ends = accumulate(len(request.sample_indices) for _, request in row_requests)
    return [range(end - len(request.sample_indices), end) for end, (_, request) in zip(ends, row_requests, strict=True)]


def _is_restricted(request: SampleRequest) -> bool:
    """Return True if tokens are forbidden."""
    return bool(request.banned_token_ids) or request.sampling.is_constrained


def _takes_best(request: SampleRequest) -> bool:
    """Return True if the most likely of the allowed tokens is drawn."""
    sampling = request.sampling
    return sampling.is_greedy and not (sampling.has_penalties or sampling.logit_bias)
