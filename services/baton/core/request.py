"""What a client asks for and what it gets back, in the form that every service shares."""

from dataclasses import dataclass, field
from enum import Enum

from baton.core.ids import DecisionId, JobId
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import SAMPLER_VERSION

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature sampling is argmax: dividing by less would only overflow."""


class FinishReason(Enum):
    """Why a sample ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn: argmax(logits / temperature + g), g keyed by (seed, sample_index, position, token
    id).

    `top_k` 0 and `top_p` 1 and `min_p` 0 keep everything. Penalties and `min_tokens` / `max_tokens` count
    from the request's own `num_prompt_tokens`, so a retry sends them unchanged. `num_logprobs` None: none; 0:
    the chosen token's only.
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
    sampler_version: int = SAMPLER_VERSION

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The promise a request asks for; None means none."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def or_else(self, default: "Slo") -> "Slo":
        """What is not asked for is taken from `default`."""
        return Slo(
            ttft_s=default.ttft_s if self.ttft_s is None else self.ttft_s,
            tpot_s=default.tpot_s if self.tpot_s is None else self.tpot_s,
        )


NO_SLO = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt's request as the gateway owns it, validated, tokenized and hashed. `sample_indices` is
    `range(n)` at first and one index for a sample that goes on alone after a lost leg. `received_s` and
    `deadline_s` are times of the gateway's event loop, not durations."""

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
    adapter: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities of one position, of the model's own distribution before temperature,
    penalties and truncation: the chosen token's and those of the `num_logprobs` most likely ones, most likely
    first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that one job counted. `num_cached_tokens`: prompt tokens whose KV was not computed for this job,
    by tier name."""

    num_prompt_tokens: int
    num_cached_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegTimeline:
    """Where one leg's seconds went; every value a duration by one clock of the worker's, None for what the
    leg did not do.

    Of the prompt: `queue_s` until memory was there, `compute_s` from then to its first token. Of a pull:
    `kv_wait_s` until the owner's first block was computed; `kv_transfer_s` while a read was running;
    `kv_exposed_s` from the owner's last block to the last one landed, of which `kv_exposed_wait_s` until the
    last read began; `kv_admission_s` from there to the start of the first step with it. Of the answer:
    `first_decode_s`, that of the first step that made a token after the prompt's own; `decode_s` from the
    first token to the last. `kv_early_bytes` of `kv_bytes` had been read when the owner announced its last
    block.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one sample. `output_index` is that of its first token, 0 = the sample's first output,
    counted over all attempts; the gateway delivers each index once. `finish` marks the sample's last delta
    from this leg."""

    job: JobId
    sample_index: int
    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    timeline: LegTimeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestActuals:
    """What really happened to a placed request, for the decision record: of this attempt alone. `ttft_s`:
    from the question to the scheduler to the client's first token, None where an earlier attempt had brought
    that; `tpot_s`: the mean gap between a sample's tokens, None where no sample got two."""

    decision_id: DecisionId
    outcome: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    legs: tuple[LegTimeline, ...] = ()
