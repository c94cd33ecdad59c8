"""Builds jobs whose prompt depends only on the name of the request."""

from random import Random
from typing import Any

from baton.core.ids import JobId
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import Sampling

VOCAB_SIZE = 1000


def prefill_job(num_tokens: int = 10, *, request: bytes = b"request-0", attempt: int = 0, **changes: Any) -> PrefillJob:
    return PrefillJob(**(_fields(num_tokens, request, attempt) | changes))


def decode_job(num_tokens: int = 10, *, request: bytes = b"request-0", attempt: int = 0, **changes: Any) -> DecodeJob:
    return DecodeJob(**(_fields(num_tokens, request, attempt) | changes))


def _fields(num_tokens: int, request: bytes, attempt: int) -> dict[str, Any]:
    drawn = Random(request)
    return {
        "job": JobId(request_id=request, attempt=attempt),
        "token_ids": token_ids(drawn.randrange(VOCAB_SIZE) for _ in range(num_tokens)),
        "num_prompt_tokens": num_tokens,
        "sampling": Sampling(max_tokens=8, ignore_eos=True),
        "sample_indices": (0,),
        "deadline_s": 60.0,
    }
