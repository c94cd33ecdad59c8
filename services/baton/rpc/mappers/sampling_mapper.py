"""Converts sampling parameters between core and protobuf, and checks their limits again at the worker.

As in `common_mapper`, `from_x` raises Refused and nothing else.
"""

from baton.core.errors import invalid
from baton.core.request import Sampling
from baton.core.request_limits import LIMITS, MAX_BAD_WORD_TOKENS, MAX_GRAMMAR_BYTES, OutOfLimits
from baton.wire.v1 import common_pb2 as pb

_SAMPLING_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def to_sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        grammar=sampling.grammar,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[pb.TokenSequence(token_ids=word) for word in sampling.bad_words],
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        sampler_version=sampling.sampler_version,
    )


def from_sampling(message: pb.Sampling) -> Sampling:
    """Convert sampling parameters. Raises Refused for a number outside its limits."""
    sampling = Sampling(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in message.logit_bias),
        grammar=message.grammar,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        sampler_version=message.sampler_version,
    )
    try:
        for field in _SAMPLING_NUMBERS:
            LIMITS[field].check(field, getattr(sampling, field))
        for _, bias in sampling.logit_bias:
            LIMITS["logit_bias"].check("logit_bias", bias)
        _check_rules(sampling)
    except OutOfLimits as error:
        raise invalid(f"sampling: {error}") from error
    return sampling


def _check_rules(sampling: Sampling) -> None:
    """Check the sizes of the rules that forbid tokens. Raises OutOfLimits."""
    size = len(sampling.grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise OutOfLimits("grammar", f"grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    LIMITS["allowed_token_ids"].check_count("allowed_token_ids", len(sampling.allowed_token_ids))
    LIMITS["bad_words"].check_count("bad_words", len(sampling.bad_words))
    for word in sampling.bad_words:
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            message = f"bad_words has an entry of {len(word)} tokens; each must have 1 to {MAX_BAD_WORD_TOKENS}"
            raise OutOfLimits("bad_words", message)
