"""One attempt at one request: what the scheduler is asked, and the two jobs that follow from its answer."""

import asyncio
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.ids import JobId, WorkerRef
from baton.core.kv.block_hash import BlockHash, TokenIds, chain, root_hash
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import GenerateRequest

HASHES_A_TURN = 512
"""Blocks hashed before the event loop gets its turn: about half a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """`request.token_ids` is the prompt and what was delivered by earlier attempts. `avoid`: workers that
    failed the request before."""

    request: GenerateRequest
    number: int
    block_hashes: tuple[BlockHash, ...] = ()
    hash_scheme: str = ""
    model_fingerprint: str = ""
    avoid: tuple[WorkerRef, ...] = ()

    @property
    def job(self) -> JobId:
        return JobId(request_id=self.request.request_id, attempt=self.number)

    @property
    def num_replayed(self) -> int:
        """Outputs of earlier attempts that are prefilled together with the prompt."""
        return len(self.request.token_ids) - self.request.num_prompt_tokens

    def query(self, now_s: float, answer_within_s: float) -> PlacementQuery:
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
            model_fingerprint=self.model_fingerprint,
            sample_count=len(request.sample_indices),
            adapter=request.adapter,
            tenant=request.tenant,
            slo=request.slo,
            priority=request.priority,
            deadline_s=max(0.0, request.deadline_s - now_s),
            avoid=self.avoid,
            waited_s=max(0.0, now_s - request.received_s),
            answer_within_s=answer_within_s,
            trace_context=request.trace_context,
        )

    def jobs(self, placement: Placement, now_s: float) -> tuple[PrefillJob | None, DecodeJob | None]:
        """What leaves for the two sides; None for a side that the placement leaves empty."""
        prefill, decode = placement.prefill, placement.decode
        if prefill is not None and decode is not None and prefill.is_same_incarnation(decode):
            prefill = None  # never so in a valid placement: one worker computes the prompt where it decodes
        request = self.request
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
            "tpot_slo_s": request.slo.tpot_s or 0.0,
        }
        source = placement.prefix_source  # for the side that computes the prompt
        return (
            PrefillJob(**common, reader=decode, prefix_source=source) if prefill is not None else None,
            DecodeJob(**common, owner=prefill, prefix_source=None if prefill else source)
            if decode is not None
            else None,
        )


async def attempt_at(
    request: GenerateRequest, number: int, layout: KvLayout | None, avoid: tuple[WorkerRef, ...] = ()
) -> Attempt:
    """The attempt with its prompt's blocks hashed as workers of `layout` hash them; without hashes while no
    layout is known."""
    if layout is None:
        return Attempt(request=request, number=number, avoid=avoid)
    root = root_hash(
        model_fingerprint=layout.model_fingerprint,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        block_size_tokens=layout.block_size_tokens,
    )
    rest = chain(root, request.token_ids, layout.block_size_tokens)
    hashes: list[BlockHash] = list(islice(rest, HASHES_A_TURN))
    while len(hashes) % HASHES_A_TURN == 0 and (more := list(islice(rest, HASHES_A_TURN))):
        hashes += more
        await asyncio.sleep(0)
    return Attempt(
        request=request, number=number, block_hashes=tuple(hashes), hash_scheme=layout.hash_scheme, avoid=avoid
    )


def going_on(request: GenerateRequest, tokens: TokenIds) -> GenerateRequest:
    """The same request with these outputs delivered. Sampling is unchanged: its counts begin at
    `num_prompt_tokens`."""
    return replace(request, token_ids=request.token_ids[: request.num_prompt_tokens] + tokens)


def sample_alone(request: GenerateRequest, sample_index: int, tokens: TokenIds, request_id: bytes) -> GenerateRequest:
    """One sample of a request, as a request of its own, after its first `tokens`."""
    return replace(going_on(request, tokens), request_id=request_id, sample_indices=(sample_index,))
