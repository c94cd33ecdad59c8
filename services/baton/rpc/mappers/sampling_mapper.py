"""Converts sampling parameters between core and protobuf, and checks their limits again at the worker.

As in `common_mapper`, `from_x` raises Refused and nothing else.
"""

from baton.core.errors import invalid
from baton.core.request import Sampling
from baton.core.request_limits import LIMITS, MAX_BAD_WORD_TOKENS, MAX_GRAMMAR_BYTES, OutOfLimits
from baton.rpc.mappers.message_mapping import MessageMapping, nested, repeated
from baton.wire.v1 import common_pb2 as pb

_SAMPLING_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

_SAMPLING = MessageMapping(
    Sampling,
    pb.Sampling,
    {
        "stop_token_ids": nested(tuple, tuple),
        "logit_bias": repeated(
            lambda pair: pb.LogitBias(token_id=pair[0], bias=pair[1]), lambda message: (message.token_id, message.bias)
        ),
        "allowed_token_ids": nested(tuple, tuple),
        "bad_words": repeated(lambda word: pb.TokenSequence(token_ids=word), lambda message: tuple(message.token_ids)),
    },
)

to_sampling = _SAMPLING.to_wire


def from_sampling(message: pb.Sampling) -> Sampling:
    """Convert sampling parameters. Raises Refused for a number outside its limits."""
    sampling = _SAMPLING.from_wire(message)
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
