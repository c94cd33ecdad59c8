"""Limits of an engine, and the check of requests against them."""

from dataclasses import dataclass

from baton.core.errors import Code, ConfigError, Failure, Reason, Refused, invalid
from baton.core.kv.kv_tables import TableWindows
from baton.core.step_targets import DEFAULT_FACTORS, TargetFactors
from baton.engine.state.sequence import SequenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine. Raises ConfigError for values that cannot work together.

    max_num_batched_tokens: token budget of a step.
    max_num_seqs: sequences that may have blocks at the same time.
    max_model_len: longest prompt plus response, in tokens.
    block_size_tokens: tokens per KV block.
    eos_token_ids: tokens that end a response, unless the request ignores them.
    max_waiting_seqs: length of the queue.
    targets: factors of the latency targets of requests without an SLO.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    max_waiting_seqs: int = 1024
    targets: TargetFactors = DEFAULT_FACTORS

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "block_size_tokens",
            "max_waiting_seqs",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that a step has a token for every sequence: raise it or lower max_num_seqs"
            )


def check_possible(request: SequenceRequest, config: EngineConfig, num_blocks: int, windows: TableWindows) -> None:
    """Check that an engine with these limits and `num_blocks` KV blocks can run `request` at all.

    Raises Refused if it can never run, and ValueError if its block hashes or sample indices are inconsistent.
    """
    num_tokens = len(request.token_ids)
    num_full_blocks = num_tokens // config.block_size_tokens
    if len(request.block_hashes) != num_full_blocks:
        raise ValueError(
            f"{len(request.block_hashes)} block hashes for {num_full_blocks} full blocks; give one per block"
        )
    if not request.sample_indices or len(set(request.sample_indices)) < len(request.sample_indices):
        raise ValueError(f"sample_indices is {request.sample_indices}; must have at least one index and no duplicates")
    if not 1 <= request.num_prompt_tokens <= num_tokens:
        raise invalid(f"num_prompt_tokens is {request.num_prompt_tokens}; must be between 1 and {num_tokens}")
    if num_tokens - request.num_prompt_tokens >= request.sampling.max_tokens:
        raise invalid(
            f"max_tokens ({request.sampling.max_tokens}) output tokens are given already; nothing is left to generate"
        )
    if num_tokens >= config.max_model_len:
        message = (
            f"{num_tokens} tokens; must be fewer than the maximum length of {config.max_model_len}, which includes "
            "the response: send fewer"
        )
        raise invalid(message, Reason.CONTEXT_LENGTH_EXCEEDED)
    if request.num_slots > config.max_num_seqs:
        raise no_capacity(
            Reason.NO_CAPACITY,
            f"{request.num_slots} samples; this worker runs at most {config.max_num_seqs} sequences: ask for fewer",
        )
    needed = windows.num_blocks_at_once(request.max_kv_tokens(config.max_model_len), config.max_num_batched_tokens)
    if needed > num_blocks:
        raise no_capacity(
            Reason.NO_CAPACITY,
            f"prompt and max_tokens need {needed} KV blocks; this worker has {num_blocks}: use fewer tokens",
        )


def no_capacity(reason: Reason, message: str, *, retry_after_s: float | None = None) -> Refused:
    """Return a retriable refusal: another worker may have the capacity, or this one after `retry_after_s`."""
    return Refused(
        Failure(
            code=Code.RESOURCE_EXHAUSTED, reason=reason, message=message, retry_after_s=retry_after_s, retriable=True
        )
    )
