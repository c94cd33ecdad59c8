"""Constrained jobs: exact over a hand-over, refused before they run, and nothing held afterwards."""

import gc
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from baton.core.errors import Code, Reason
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import FinishReason, Sampling
from baton.engine.constraints.compiled_grammar import GRAMMAR_BYTES
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.worker.worker_budget import (
    MATCHER_BYTES,
    PROMPT_LOGPROB_BYTES,
    RULE_BYTES,
    RULE_TOKEN_BYTES,
    job_bytes,
)
from tests.unit.worker.harness import Node, pair
from tests.unit.worker.job_builders import VOCAB_SIZE, decode_job, prefill_job
from tests.unit.worker.virtual_loop import virtual

END = VOCAB_SIZE - 1
PATTERN = r"[ab]{3}(-[0-9]{2}){1,4}"
CONSTRAINED = Sampling(
    max_tokens=20,
    grammar=str(LLMatcher.grammar_from_regex(PATTERN)),
    stop_token_ids=(END,),
    ignore_eos=True,
    seed=5,
)


def constraints_of(node: Node) -> TokenConstraints:
    return node.worker.jobs._parts.constraints


def num_rules(node: Node) -> int:
    gc.collect()
    return len(constraints_of(node)._rules)


@virtual
async def test_constrained_answers_are_equal_on_one_worker_and_on_two() -> None:
    async with pair() as workers:
        answers = []
        for seed in range(6):
            sampling = replace(CONSTRAINED, seed=seed)
            _, decode = workers.send(num_tokens=30, request=b"same", attempt=2 * seed, sampling=sampling)
            await workers.to_d.ended(decode.job)
            alone = decode_job(30, request=b"same", attempt=2 * seed + 1, sampling=sampling)
            workers.to_d.send(alone)
            await workers.to_d.ended(alone.job)
            tokens = workers.to_d.tokens(decode.job)
            assert workers.to_d.tokens(alone.job) == tokens
            ended = workers.to_d.finishes(decode.job) == [(0, FinishReason.STOP)]
            text = bytes(tokens[:-1] if ended else tokens).decode()
            assert re.fullmatch(PATTERN, text) if ended else re.match(r"[ab]{1,3}", text), text
            answers.append((text, ended))
        assert len(set(answers)) > 3
        assert any(ended for _, ended in answers)
        _, decode = workers.send(num_tokens=30, request=b"unconstrained")
        await workers.to_d.ended(decode.job)
        await workers.until_clean()
        assert (num_rules(workers.p), num_rules(workers.d)) == (0, 0)


@virtual
async def test_samples_of_a_request_follow_the_grammar_on_their_own() -> None:
    async with pair() as workers:
        _, decode = workers.send(num_tokens=30, sampling=CONSTRAINED, sample_indices=(0, 1, 2, 3))
        await workers.to_d.ended(decode.job, (0, 1, 2, 3))
        texts = {bytes(t for t in workers.to_d.tokens(decode.job, sample) if t < 256) for sample in range(4)}
        assert len(texts) > 1
        assert all(re.fullmatch(rb"[ab]{3}(-[0-9]{2}){1,4}", text) for text in texts), texts


@virtual
async def test_invalid_grammar_is_refused_before_any_step() -> None:
    async with pair() as workers:
        prefill, decode = workers.send(num_tokens=30, sampling=replace(CONSTRAINED, grammar="start: nothing"))
        for gateway, job in ((workers.to_p, prefill), (workers.to_d, decode)):
            failure = await gateway.failed(job.job)
            assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, Reason.INVALID_GRAMMAR)
            assert not failure.retriable
        assert workers.p.executor.plans == workers.d.executor.plans == []
        await workers.until_clean()


@virtual
async def test_worker_without_a_tokenizer_refuses_grammars_and_serves_other_jobs() -> None:
    async with pair() as workers:
        jobs = workers.d.worker.jobs
        jobs._parts = replace(jobs._parts, constraints=TokenConstraints(vocab_size=VOCAB_SIZE))
        refused, served = decode_job(30, sampling=CONSTRAINED), decode_job(30, request=b"other")
        workers.to_d.send(refused)
        workers.to_d.send(served)
        failure = await workers.to_d.failed(refused.job)
        assert (failure.reason, failure.retriable) == (Reason.INVALID_GRAMMAR, False)
        assert "supports no grammars: it has no tokenizer" in failure.message
        await workers.to_d.ended(served.job)
        unknown = decode_job(30, request=b"unknown", sampling=Sampling(max_tokens=8, allowed_token_ids=(VOCAB_SIZE,)))
        workers.to_d.send(unknown)
        assert "allowed_token_ids has token id 1000" in (await workers.to_d.failed(unknown.job)).message


@pytest.mark.fault("F-56")
@virtual
async def test_no_token_left_on_the_prefill_worker_is_final_for_both_legs() -> None:
    async with pair() as workers:
        stuck = replace(CONSTRAINED, allowed_token_ids=(END,))
        prefill, decode = workers.send(num_tokens=30, sampling=stuck)
        for gateway, job in ((workers.to_p, prefill), (workers.to_d, decode)):
            failure = await gateway.failed(job.job)
            assert (failure.code, failure.reason) == (Code.UNPROCESSABLE, Reason.NO_TOKEN_LEFT)
            assert not failure.retriable
        await workers.until_clean()


@pytest.mark.fault("F-56")
@virtual
async def test_sequence_without_a_token_left_ends_alone() -> None:
    async with pair() as workers:
        stuck = decode_job(30, sampling=replace(CONSTRAINED, stop_token_ids=(), max_tokens=40))
        other = decode_job(30, request=b"other", sampling=replace(CONSTRAINED, seed=1))
        workers.to_d.send(stuck)
        workers.to_d.send(other)
        failure = await workers.to_d.failed(stuck.job)
        assert (failure.reason, failure.retriable) == (Reason.NO_TOKEN_LEFT, False)
        assert "its grammar is complete" in failure.message
        await workers.to_d.ended(other.job)
        await workers.until_clean()
        assert num_rules(workers.d) <= 2  # those of the last step


@pytest.mark.fault("F-52")
@virtual
async def test_retry_continues_a_constrained_answer_after_any_token() -> None:
    async with pair() as workers:
        _, decode = workers.send(num_tokens=30, sampling=CONSTRAINED)
        await workers.to_d.ended(decode.job)
        whole = workers.to_d.tokens(decode.job)
        for count in range(1, len(whole)):
            tokens = decode.token_ids + type(decode.token_ids)("I", whole[:count])
            again = replace(decode_job(30, attempt=count, sampling=CONSTRAINED), token_ids=tokens)
            workers.to_d.send(again)
            await workers.to_d.ended(again.job)
            assert workers.to_d.tokens(again.job) == whole[count:]
        mismatch = decode.token_ids + decode.token_ids[:5]
        wrong = replace(decode_job(30, attempt=50, sampling=CONSTRAINED), token_ids=mismatch)
        workers.to_d.send(wrong)
        failure = await workers.to_d.failed(wrong.job)
        assert (failure.reason, failure.retriable) == (Reason.NO_TOKEN_LEFT, False)
        assert "does not match its grammar" in failure.message


@pytest.mark.parametrize("make", [prefill_job, decode_job])
def test_rules_count_as_memory_of_the_job(make: Callable[..., PrefillJob | DecodeJob]) -> None:
    def size(sampling: Sampling) -> int:
        return job_bytes(make(10, sampling=sampling, sample_indices=(0, 1)), 4096)

    plain = Sampling(max_tokens=8)
    assert size(replace(plain, grammar="x" * 1000)) - size(plain) == 1000 * GRAMMAR_BYTES + 2 * MATCHER_BYTES
    rules = replace(plain, allowed_token_ids=(1, 2, 3), bad_words=((1, 2), (3,)))
    assert size(rules) - size(plain) == 6 * RULE_TOKEN_BYTES + 2 * RULE_BYTES
    assert size(replace(plain, logit_bias=((1, 0.5),) * 1000)) - size(plain) == 1000 * RULE_BYTES
    assert size(replace(plain, num_prompt_logprobs=20)) - size(plain) == 10 * 21 * PROMPT_LOGPROB_BYTES
