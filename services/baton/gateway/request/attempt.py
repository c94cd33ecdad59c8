"""One attempt at one request: its placement query, and the jobs that follow from the placement."""

import asyncio
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.ids import JobId, WorkerRef
from baton.core.kv.block_hash import BlockHash, TokenIds, chain, prefix_key, root_hash
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import GenerateRequest

HASHES_PER_YIELD = 512
"""Blocks to hash before yielding to the event loop. They take about half a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a request.

    request: its `token_ids` are the prompt and the outputs that earlier attempts delivered.
    number: 0 for the first attempt.
    prefix_key: see `PlacementQuery`.
    block_hashes, hash_scheme: hashes of the full blocks of `token_ids`; empty if no KV layout is known yet.
    model_fingerprint: if not empty, only workers with this fingerprint may run the attempt.
    avoid: workers on which an earlier attempt failed.
    """

    request: GenerateRequest
    number: int
    block_hashes: tuple[BlockHash, ...] = ()
    hash_scheme: str = ""
    prefix_key: bytes = b""
    model_fingerprint: str = ""
    avoid: tuple[WorkerRef, ...] = ()

    @property
    def job(self) -> JobId:
        """Id of both jobs of this attempt."""
        return JobId(request_id=self.request.request_id, attempt=self.number)

    @property
    def num_replayed(self) -> int:
        """Number of outputs of earlier attempts, which are prefilled together with the prompt."""
        return len(self.request.token_ids) - self.request.num_prompt_tokens

    def query(self, now_s: float, answer_within_s: float) -> PlacementQuery:
        """Build the placement query. `now_s` is event loop time; the scheduler answers within
        `answer_within_s`."""
        request = self.request
        return PlacementQuery(
            request_id=request.request_id,
            attempt=self.number,
            model=request.model,
            num_prompt_tokens=len(request.token_ids),
            num_output_tokens=self.num_replayed,
            max_tokens=request.sampling.max_tokens,
            block_hashes=self.block_hashes,
            hash_scheme=self.hash_scheme,
            prefix_key=self.prefix_key,
            model_fingerprint=self.model_fingerprint,
            sample_count=len(request.sample_indices),
            tenant=request.tenant,
            session_key=request.session,
            slo=request.slo,
            priority=request.priority,
            deadline_s=max(0.0, request.deadline_s - now_s),
            avoid=self.avoid,
            waited_s=max(0.0, now_s - request.received_s),
            answer_within_s=answer_within_s,
            trace_context=request.trace_context,
        )

    def jobs(self, placement: Placement, now_s: float) -> tuple[PrefillJob | None, DecodeJob | None]:
        """Build the (prefill job, decode job) of a placement. A job is None if the placement names no such
        worker."""
        prefill, decode = placement.prefill, placement.decode
        if prefill is not None and decode is not None and prefill.is_same_incarnation(decode):
            prefill = None  # a valid placement names a worker once: a decode worker can compute the prompt itself
        request = self.request
        awaits_first_token = not self.num_replayed
        common: dict[str, Any] = {
            "job": self.job,
            "token_ids": request.token_ids,
            "num_prompt_tokens": request.num_prompt_tokens,
            "sampling": request.sampling,
            "sample_indices": request.sample_indices,
            "deadline_s": max(0.0, request.deadline_s - now_s),
            "priority": request.priority,
            "cache_salt": request.cache_salt,
            "decision_id": placement.decision_id,
            "trace_context": request.trace_context,
            "ttft_slo_s": (request.slo.ttft_s or 0.0) if awaits_first_token else 0.0,
            "tpot_slo_s": request.slo.tpot_s or 0.0,
            "waited_s": max(0.0, now_s - request.received_s) if awaits_first_token else 0.0,
        }
        source = placement.prefix_source  # goes to the worker that computes the prompt
        return (
            PrefillJob(
                **common,
                hints=request.hints.before_end(placement.answer_s or 0.0),
                reader=decode,
                prefix_source=source,
            )
            if prefill is not None
            else None,
            DecodeJob(**common, hints=request.hints, owner=prefill, prefix_source=None if prefill else source)
            if decode is not None
            else None,
        )


async def prompt_hashes(token_ids: TokenIds, cache_salt: bytes, layout: KvLayout) -> tuple[BlockHash, ...]:
    """Return the hashes of a prompt's full blocks, as workers with this layout compute them.

    Yields to the event loop during long prompts.
    """
    root = root_hash(
        model_fingerprint=layout.model_fingerprint,
        cache_salt=cache_salt,
        block_size_tokens=layout.block_size_tokens,
    )
    rest = chain(root, token_ids, layout.block_size_tokens)
    hashes: list[BlockHash] = list(islice(rest, HASHES_PER_YIELD))
    while len(hashes) % HASHES_PER_YIELD == 0 and (more := list(islice(rest, HASHES_PER_YIELD))):
        hashes += more
        await asyncio.sleep(0)
    return tuple(hashes)


async def make_attempt(
    request: GenerateRequest, number: int, layout: KvLayout | None, avoid: tuple[WorkerRef, ...] = ()
) -> Attempt:
    """Build an attempt and hash its prompt's blocks as workers with this layout do.

    Yields to the event loop during long prompts. The attempt has no hashes if `layout` is None.
    """
    if layout is None:
        return Attempt(request=request, number=number, avoid=avoid)
    return Attempt(
        request=request,
        number=number,
        block_hashes=await prompt_hashes(request.token_ids, request.cache_salt, layout),
        hash_scheme=layout.hash_scheme,
        prefix_key=prefix_key(request.token_ids, layout.block_size_tokens),
        avoid=avoid,
    )


def continued_request(request: GenerateRequest, tokens: TokenIds) -> GenerateRequest:
    """Return the request with `tokens` appended to its prompt as delivered outputs.

    Sampling parameters stay the same, because they count from `num_prompt_tokens`. The logprobs of the prompt
    have arrived with the first output, so they are not computed again.
    """
    sampling = replace(request.sampling, num_prompt_logprobs=None) if tokens else request.sampling
    return replace(request, token_ids=request.token_ids[: request.num_prompt_tokens] + tokens, sampling=sampling)


def single_sample_request(
    request: GenerateRequest, sample_index: int, tokens: TokenIds, request_id: bytes
) -> GenerateRequest:
    """Return a request that continues one sample, whose `tokens` were delivered, under a new request id."""
    return replace(continued_request(request, tokens), request_id=request_id, sample_indices=(sample_index,))
