"""Requests, sampling parameters, token deltas and timelines, as all services exchange them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from baton.core.ids import DecisionId, JobId
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import SAMPLER_VERSION

GREEDY_TEMPERATURE = 1e-5
"""Highest temperature at which sampling is argmax. Dividing logits by less would overflow."""


class FinishReason(Enum):
    """Reason why a sample ended. The values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The message contains tool calls. Only the gateway sets it, in place of `STOP`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request.

    A token is drawn as argmax(logits / temperature + g), where the Gumbel noise g is a function of (seed,
    sample_index, position, token id). A retry therefore draws the same tokens from the
    same logits.

    `top_k` 0, `top_p` 1 and `min_p` 0 disable the filter. Penalties, `min_tokens` and `max_tokens` count from
    the request's original `num_prompt_tokens`, so a retry sends them unchanged. `num_logprobs` None reports
    no logprobs, and 0 reports only the chosen token's.

    grammar: llguidance grammar that the output must match, in canonical form; empty if there is none.
    num_prompt_logprobs: number of most likely tokens to report for each prompt token; None reports none. The
        prompt is then computed without the prefix cache.
    allowed_token_ids: the only tokens that may be drawn, ascending; empty allows all.
    bad_words: token sequences that the output must not contain.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int | None = None
    sampler_version: int = SAMPLER_VERSION

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def is_constrained(self) -> bool:
        """True if grammar, `allowed_token_ids` or `bad_words` forbid tokens."""
        return bool(self.grammar or self.allowed_token_ids or self.bad_words)

    @property
    def has_penalties(self) -> bool:
        """True if any penalty changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_outputs(self) -> bool:
        """True if drawing a token needs the tokens before it on the host."""
        return self.has_penalties or bool(self.grammar) or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service level objective of a request, in seconds. None means no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def with_defaults(self, default: "Slo") -> "Slo":
        """Return this SLO with unset fields taken from `default`."""
        return Slo(
            ttft_s=default.ttft_s if self.ttft_s is None else self.ttft_s,
            tpot_s=default.tpot_s if self.tpot_s is None else self.tpot_s,
        )


NO_SLO = Slo()


class SessionKey(NamedTuple):
    """Names a client's session among those of all tenants."""

    tenant: str
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHints:
    """The expected next use of a request's KV, for its workers.

    session: id of the client's session within the tenant, or empty.
    retain_s: the client asks to keep the KV for this time after the answer; 0 ends what an earlier request
        has asked for; None: nothing is asked for.
    next_in_s: time from the end of the answer to the next request of the session, as far as the client knows
        it; None if it does not.
    """

    tenant: str = "default"
    session: str = ""
    retain_s: float | None = None
    next_in_s: float | None = None

    @property
    def key(self) -> SessionKey | None:
        """The session; None if the client has named none."""
        return SessionKey(self.tenant, self.session) if self.session else None

    def before_end(self, rest_s: float) -> "SessionHints":
        """Return the hints for a worker that is done `rest_s` seconds before the answer ends."""
        retain_s, next_in_s = self.retain_s, self.next_in_s
        return replace(
            self,
            retain_s=retain_s + rest_s if retain_s else retain_s,
            next_in_s=None if next_in_s is None else next_in_s + rest_s,
        )


NO_HINTS = SessionHints()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Request for one prompt as the gateway holds it, validated and tokenized.

    token_ids: the prompt, followed by outputs that earlier attempts delivered.
    num_prompt_tokens: number of tokens of the original prompt.
    sample_indices: `range(n)` at first; a single index once a sample continues separately after a failed
        attempt.
    received_s, deadline_s: times on the gateway's event loop clock, not durations.
    priority: lower numbers are served first.
    tenant, cache_salt: prefixes are shared only within a tenant; the salt is part of the block hashes.
    trace_context: W3C `traceparent`, or empty.
    session, retain_s, next_in_s: see `SessionHints`.
    """

    request_id: bytes
    model: str
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: Sampling
    sample_indices: tuple[int, ...] = (0,)
    received_s: float
    deadline_s: float
    priority: int = 0
    slo: Slo = NO_SLO
    tenant: str = "default"
    cache_salt: bytes = b""
    trace_context: str = ""
    session: str = ""
    retain_s: float | None = None
    next_in_s: float | None = None

    @property
    def hints(self) -> SessionHints:
        """The expected next use of its KV."""
        return SessionHints(tenant=self.tenant, session=self.session, retain_s=self.retain_s, next_in_s=self.next_in_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, before temperature, penalties and truncation.

    logprob: of the chosen token.
    top: (token id, logprob) of the `num_logprobs` most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Natural-log probabilities of consecutive prompt tokens, in arrays, because a prompt may have many.

    num_top: number of most likely tokens at each position.
    chosen: [num_tokens] float32, of the prompt's own tokens.
    ranks: [num_tokens] uint32, of the prompt's own tokens; 1 is the most likely token.
    top_ids, top_values: [num_tokens * num_top] uint32 and float32, most likely first.
    """

    num_top: int
    chosen: "array[float]" = field(default_factory=lambda: array("f"))
    ranks: TokenIds = field(default_factory=lambda: array("I"))
    top_ids: TokenIds = field(default_factory=lambda: array("I"))
    top_values: "array[float]" = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.chosen)

    @classmethod
    def joined(cls, parts: "Sequence[PromptLogprobs]") -> "PromptLogprobs | None":
        """Return the logprobs of successive parts of a prompt as one; None if there is no part."""
        if not parts:
            return None
        whole = cls(num_top=parts[0].num_top)
        for part in parts:
            whole.chosen.extend(part.chosen)
            whole.ranks.extend(part.ranks)
            whole.top_ids.extend(part.top_ids)
            whole.top_values.extend(part.top_values)
        return whole

    def at(self, index: int, num_top: int | None = None) -> TokenLogprobs:
        """Return the logprobs of one token, with at most `num_top` of the most likely ones."""
        begin = index * self.num_top
        end = begin + (self.num_top if num_top is None else min(num_top, self.num_top))
        top = tuple(zip(self.top_ids[begin:end], self.top_values[begin:end], strict=True))
        return TokenLogprobs(logprob=self.chosen[index], top=top)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Prompt tokens of one job.

    num_cached_tokens: prompt tokens whose KV was reused instead of computed, by the name of the cache tier.
    """

    num_prompt_tokens: int
    num_cached_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegTimeline:
    """Durations of one leg, that is, of one worker's part of one attempt.

    All durations are in seconds of the worker's own clock. None means that the leg did not have that phase.

    queue_s: from arrival until blocks for the prompt were allocated.
    compute_s: from then to the first token.
    num_computed_tokens, num_cached_tokens: prompt tokens computed by this worker, and reused from a cache.
    kv_wait_s: wait until the KV owner had computed its first block.
    kv_transfer_s: time in which at least one read was running.
    kv_exposed_s: from the owner's announcement of its last block until the last block was received.
    kv_exposed_wait_s: the part of `kv_exposed_s` before the last read began.
    kv_admission_s: from the last block received until the first step that used the KV.
    kv_bytes: bytes of KV read from the owner.
    kv_early_bytes: the part of `kv_bytes` that was read before the owner announced its last block.
    transport: name of the transfer backend.
    first_decode_s: duration of the step that produced the first token after the prefill's own.
    decode_s: from the first token to the last.
    num_draft_tokens, num_accepted_tokens: draft tokens that were verified, and those that became output.
    num_preemptions: how often its samples lost their KV while they ran, because too few blocks were free.
    num_recomputed_tokens: tokens whose KV was computed again after that. The others came from a cache.
    """

    worker_id: str
    pid: int
    queue_s: float | None = None
    compute_s: float | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    kv_wait_s: float | None = None
    kv_transfer_s: float | None = None
    kv_exposed_s: float | None = None
    kv_exposed_wait_s: float | None = None
    kv_admission_s: float | None = None
    kv_bytes: int = 0
    kv_early_bytes: int = 0
    transport: str = ""
    first_decode_s: float | None = None
    decode_s: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one sample.

    output_index: index of the first of `token_ids` among the sample's outputs, counted over all attempts. The
        gateway delivers each index once.
    finish: set in the sample's last delta from this job.
    usage, timeline: set once per job, by the worker that knows them.
    prompt_logprobs: of all prompt tokens but the first, in one delta of a job that was asked for them.
    is_last: the job has ended with this delta. A job that ends otherwise sends a failure as its last message.
    """

    job: JobId
    sample_index: int
    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    timeline: LegTimeline | None = None
    prompt_logprobs: PromptLogprobs | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestActuals:
    """Measured outcome of one placed attempt, reported to the scheduler for its decision record.

    outcome: "finished", or the reason of the failure.
    ttft_s: from the placement query to the client's first token; None if an earlier attempt delivered that
        token.
    tpot_s: mean gap between a sample's tokens in this attempt; None if no sample got two tokens.
    num_cached_tokens, cached_tokens_by_tier: prompt tokens whose KV was reused, in sum and by cache tier.
    """

    decision_id: DecisionId
    outcome: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    legs: tuple[LegTimeline, ...] = ()
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
