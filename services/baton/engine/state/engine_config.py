"""An engine's limits, and what they refuse."""

from dataclasses import dataclass

from baton.core.errors import Code, ConfigError, Failure, Reason, Refused, invalid
from baton.core.kv.block_hash import num_blocks_for
from baton.engine.state.sequence import SequenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ConfigError for values that cannot work together."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    max_waiting_seqs: int = 1024

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "block_size_tokens",
            "max_waiting_seqs",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs ({self.max_num_seqs}): "
                "a step could not carry every running sequence by one token; raise the first or lower the second"
            )


def check_possible(request: SequenceRequest, config: EngineConfig, num_blocks: int) -> None:
    """Raises Refused for what an engine with these limits and `num_blocks` blocks can never run, whatever
    else it does; ValueError for a mistake of the caller's own."""
    num_tokens = len(request.token_ids)
    num_full_blocks = num_tokens // config.block_size_tokens
    if len(request.block_hashes) != num_full_blocks:
        raise ValueError(f"{num_full_blocks} full blocks, but {len(request.block_hashes)} block hashes")
    if not request.sample_indices or len(set(request.sample_indices)) < len(request.sample_indices):
        raise ValueError(f"sample indices {request.sample_indices}: at least one, and each once")
    if not 1 <= request.num_prompt_tokens <= num_tokens:
        raise invalid(f"{request.num_prompt_tokens} of {num_tokens} tokens are the prompt; a prompt has at least one")
    if num_tokens - request.num_prompt_tokens >= request.sampling.max_tokens:
        raise invalid(
            f"all of max_tokens ({request.sampling.max_tokens}) are there already; nothing is left to generate"
        )
    if num_tokens >= config.max_model_len:
        message = f"{num_tokens} tokens leave no room for an answer within the model's length of {config.max_model_len}; send fewer"
        raise invalid(message, Reason.CONTEXT_LENGTH_EXCEEDED)
    if request.num_slots > config.max_num_seqs:
        raise no_capacity(
            Reason.NO_CAPACITY,
            f"{request.num_slots} samples, but this worker runs {config.max_num_seqs} sequences at most; ask for fewer",
        )
    needed = num_blocks_for(request.max_kv_tokens(config.max_model_len), config.block_size_tokens)
    if needed > num_blocks:
        raise no_capacity(
            Reason.NO_CAPACITY,
            f"prompt and max_tokens need {needed} KV blocks, this worker has {num_blocks}; send or ask for fewer tokens",
        )


def no_capacity(reason: Reason, message: str) -> Refused:
    """Another worker, or this one later, may have the room."""
    return Refused(Failure(code=Code.RESOURCE_EXHAUSTED, reason=reason, message=message, retriable=True))
