"""Constrained requests on worker processes over gRPC and NIXL: exact on one worker, on two, and after a
decode worker is killed."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM

from baton.core.errors import Code, Reason
from baton.core.ids import JobId
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import DecodeJob
from baton.core.request import FinishReason, Sampling
from baton.model.loading.model_source import DEMO_DIR
from tests.demo_vocabulary import demo_text
from tests.integration.test_constrained_exactness import ConstrainedAnswer, check
from tests.integration.worker.processes import WorkerProcess, WorkerProcesses, worker_processes
from tests.integration.worker.test_real_workers import connect_gateway, job_pair, prompt
from tests.unit.worker.scripted_gateway import Gateway

# `make test` covers this by test_constrained_exactness.py, test_exactness.py and tests/sim/test_constrained.py.
pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

PATTERN = (r"[a-z]{2,6}( [a-z]{2,6}){3,8}\.", rb"[a-z]{2,6}( [a-z]{2,6}){3,8}\.")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 16}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
GREEDY = Sampling(max_tokens=60, temperature=0.0, num_logprobs=2, grammar=str(LLMatcher.grammar_from_regex(PATTERN[0])))
SEEDED = replace(GREEDY, temperature=0.8, seed=7)
OBJECT = replace(
    SEEDED,
    grammar=str(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})),
)


class Workers:
    """A prefill, a decode and a hybrid worker, with a session to each."""

    def __init__(self, processes: WorkerProcesses, workers: list[WorkerProcess], gateways: list[Gateway]) -> None:
        self.processes = processes
        self.p, self.d, self.h = workers
        self.to_p, self.to_d, self.to_h = gateways

    async def on_two(self, number: int, tokens: Any, sampling: Sampling) -> ConstrainedAnswer:
        prefill, decode = job_pair(self.p, self.d, number, tokens, sampling=sampling)
        self.to_p.send(prefill)
        self.to_d.send(decode)
        answer = await ended(self.to_d, decode.job)
        assert self.to_p.tokens(prefill.job) == list(answer.tokens[:1])
        return answer

    async def on_one(self, number: int, tokens: Any, sampling: Sampling, replayed: int = 0) -> ConstrainedAnswer:
        job = DecodeJob(
            job=JobId(request_id=b"request-%d" % number, attempt=replayed + 1),
            token_ids=tokens,
            num_prompt_tokens=len(tokens) - replayed,
            sampling=sampling,
            sample_indices=(0,),
            deadline_s=60.0,
        )
        self.to_h.send(job)
        return await ended(self.to_h, job.job)


async def ended(gateway: Gateway, job: JobId) -> ConstrainedAnswer:
    deltas = await gateway.ended(job)
    logprobs = tuple(one for delta in deltas for one in delta.logprobs)
    ((_, finish),) = gateway.finishes(job)
    return ConstrainedAnswer(tuple(gateway.tokens(job)), logprobs, finish)


@pytest.mark.fault("F-52")
async def test_constrained_answers_of_worker_processes_are_exact_and_survive_a_kill(tmp_path: Path) -> None:
    """All checks share the processes, because each takes seconds to load torch."""
    async with worker_processes(tmp_path) as processes:
        shared = {"transfer": "nixl", "workers_on_host": 3}
        started = await processes.start_workers(
            *(
                (name, {**shared, "role": role}, {})
                for name, role in (("p", "prefill"), ("d", "decode"), ("h", "hybrid"))
            )
        )
        gateways = [await connect_gateway(processes, worker) for worker in started]
        workers = Workers(processes, started, gateways)
        await _check_exact_on_one_and_on_two(workers)
        await _check_objects_match_their_schema(workers)
        await _check_failures(workers)
        await _check_kill_of_the_decode_worker(workers)


async def _check_exact_on_one_and_on_two(workers: Workers) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32).eval()
    for number, sampling in enumerate((GREEDY, SEEDED)):
        tokens = prompt(number, 50)
        two = await workers.on_two(number, tokens, sampling)
        one = await workers.on_one(number, tokens, sampling)
        assert (two.tokens, two.end) == (one.tokens, one.end)
        check(model, tuple(tokens), sampling, PATTERN[1], 0, two)
        for count in (1, 3, 7):  # a retry after this many tokens
            again = await workers.on_one(number, tokens + token_ids(two.tokens[:count]), sampling, replayed=count)
            assert again.tokens == two.tokens[count:]


async def _check_objects_match_their_schema(workers: Workers) -> None:
    finished = 0
    for number in range(10, 16):
        answer = await workers.on_two(number, prompt(number, 20), replace(OBJECT, seed=number))
        if answer.end is FinishReason.STOP:
            value = json.loads(demo_text(list(answer.tokens)))
            assert set(value) == {"name", "ok"}
            assert isinstance(value["ok"], bool)
            assert len(value["name"]) <= 16
            finished += 1
    assert finished


async def _check_failures(workers: Workers) -> None:
    cases = (
        (replace(GREEDY, grammar="start: nothing"), Reason.INVALID_GRAMMAR, Code.INVALID_ARGUMENT),
        (replace(GREEDY, allowed_token_ids=(5,)), Reason.NO_TOKEN_LEFT, Code.UNPROCESSABLE),
    )
    for number, (sampling, reason, code) in enumerate(cases, 20):
        prefill, decode = job_pair(workers.p, workers.d, number, prompt(number, 20), sampling=sampling)
        workers.to_p.send(prefill)
        workers.to_d.send(decode)
        for gateway, job in ((workers.to_p, prefill), (workers.to_d, decode)):
            failure = await gateway.failed(job.job)
            assert (failure.reason, failure.code, failure.retriable) == (reason, code, False)
    for name in ("p", "d"):
        await workers.processes.latest_clean(name)


async def _check_kill_of_the_decode_worker(workers: Workers) -> None:
    tokens, sampling = prompt(30, 40), replace(SEEDED, seed=30)
    whole = await workers.on_one(30, tokens, sampling)
    prefill, decode = job_pair(workers.p, workers.d, 31, tokens, sampling=sampling)
    workers.to_p.send(prefill)
    workers.to_d.send(decode)
    await workers.to_d.until(lambda: len(workers.to_d.tokens(decode.job)) >= 3)
    workers.d.signal(signal.SIGKILL)
    await workers.d.exit_code(within_s=30.0)
    delivered = tuple(workers.to_d.tokens(decode.job))
    assert delivered == whole.tokens[: len(delivered)]
    if len(delivered) < len(whole.tokens):
        rest = await workers.on_one(31, tokens + token_ids(delivered), sampling, replayed=len(delivered))
        assert delivered + rest.tokens == whole.tokens
