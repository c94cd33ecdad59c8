"""The memory budget of a worker process, and the memory that its jobs may take."""

from baton.core.messages.jobs import Job, PrefillJob
from baton.core.request import Sampling
from baton.engine.constraints.compiled_grammar import GRAMMAR_BYTES
from baton.runtime.process.byte_budget import Account, ByteBudget, shares

BUDGET_WEIGHTS = {Account.JOBS: 2, Account.SESSIONS: 1, Account.STREAMS: 1}
"""Shares of the memory budget."""
JOB_BYTES = 8192
"""Objects of one job: the message, its leg, and a sequence in the engine."""
SAMPLE_BYTES = 4096
"""Objects of one further sample."""
PROMPT_TOKEN_BYTES = 16
"""A prompt token: its id in the job (4) and in the engine (4), and its share of a block hash."""
OUTPUT_TOKEN_BYTES = 8
"""A generated token: its id, and its share of a block hash."""
MATCHER_BYTES = 256 * 1024
"""The states that one sample visits in a grammar; a JSON schema takes less than 0.2 MB. What all samples of a
grammar share is bounded by `TokenConstraints`."""
RULE_TOKEN_BYTES = 64
"""A token id of `allowed_token_ids` or `bad_words`, and its entry in a table."""


RULE_BYTES = 128
"""An entry of `bad_words` without its ids, or of `logit_bias`."""
PROMPT_LOGPROB_BYTES = 16
"""The logprob of a prompt token, or of one of its alternatives, in arrays: in parts, and joined."""


def worker_budget(memory_budget: int) -> ByteBudget:
    """Return the budget of a worker that may hold `memory_budget` bytes besides weights and KV blocks."""
    return ByteBudget(shares(memory_budget, BUDGET_WEIGHTS), "worker")


def job_bytes(job: Job, max_model_len: int) -> int:
    """Return the memory of a job, with the largest output that it may generate.

    A prefill job generates one token per sample, whatever `max_tokens` is.
    """
    num_samples = len(job.sample_indices)
    max_tokens = 1 if isinstance(job, PrefillJob) else job.sampling.max_tokens
    num_output_tokens = min(max_tokens, max(0, max_model_len - len(job.token_ids)))
    return (
        JOB_BYTES
        + SAMPLE_BYTES * (num_samples - 1)
        + PROMPT_TOKEN_BYTES * len(job.token_ids)
        + OUTPUT_TOKEN_BYTES * num_output_tokens * num_samples
        + _rules_bytes(job.sampling, num_samples)
        + _prompt_logprobs_bytes(job)
    )


def _rules_bytes(sampling: Sampling, num_samples: int) -> int:
    """Return the memory of the rules that forbid tokens."""
    num_tokens = len(sampling.allowed_token_ids) + sum(map(len, sampling.bad_words))
    matchers = GRAMMAR_BYTES * len(sampling.grammar) + MATCHER_BYTES * num_samples if sampling.grammar else 0
    return RULE_TOKEN_BYTES * num_tokens + RULE_BYTES * (len(sampling.bad_words) + len(sampling.logit_bias)) + matchers


def _prompt_logprobs_bytes(job: Job) -> int:
    """Return the memory of the logprobs of a job's prompt."""
    num_top = job.sampling.num_prompt_logprobs
    return 0 if num_top is None else PROMPT_LOGPROB_BYTES * (1 + num_top) * job.num_prompt_tokens
