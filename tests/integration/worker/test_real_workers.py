"""Prefill and decode processes with the demo model in float32 over gRPC, NIXL and shared memory."""

import asyncio
import math
import signal
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import Reason
from baton.core.ids import JobId
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import Cancel, DecodeJob, PrefillJob
from baton.core.request import Sampling
from baton.worker.worker_main import UNHEALTHY_EXIT_CODE
from tests.integration.worker.processes import WorkerProcess, WorkerProcesses, worker_processes
from tests.unit.worker.scripted_gateway import Gateway

# `make test` covers this with whole clusters, by test_exactness.py, test_faults.py and test_rolling.py, and by tests of
# the worker service and of a failed transport.
pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

NEAR_TIE = 1e-4
MAX_TRIALS = 5
MARKER = 4000
"""A token that random prompts do not contain."""
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 300, 511, 512, 513, 1000, 1500)


def prompt(number: int, num_tokens: int) -> Any:
    drawn = Random(number)
    return token_ids(drawn.randrange(3, MARKER) for _ in range(num_tokens))


def job_pair(
    p: WorkerProcess, d: WorkerProcess, number: int, tokens: Any, **fields: Any
) -> tuple[PrefillJob, DecodeJob]:
    shared = {
        "job": JobId(request_id=b"request-%d" % number, attempt=0),
        "token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "sampling": Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, num_logprobs=1),
        "sample_indices": (0,),
        "deadline_s": 60.0,
    }
    return PrefillJob(**{**shared, **fields, "reader": d.ref}), DecodeJob(**{**shared, **fields, "owner": p.ref})


@cache
def reference() -> Any:
    """Return the reference: the demo model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from baton.model.loading.model_source import DEMO_DIR

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32, attn_implementation="sdpa").eval()


def check_exact(tokens: Any, answer: list[int], logprobs: list[float]) -> None:
    """Check an answer with one forward pass of the reference over prompt and answer.

    Each token must be the reference's best, or within a near-tie of it, and have the reference's logprob.
    """
    import torch

    with torch.inference_mode():
        logits = reference()(torch.tensor([[*tokens, *answer]])).logits[0, len(tokens) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    for position, (token, logprob) in enumerate(zip(answer, logprobs, strict=True)):
        row = expected[position]
        assert row.max() - row[token] < NEAR_TIE, position
        assert math.isclose(float(row[token]), logprob, abs_tol=NEAR_TIE), position


async def connect_gateway(processes: WorkerProcesses, worker: WorkerProcess) -> Gateway:
    gateway = Gateway(processes.network, worker.ref)
    await gateway.connect()
    return gateway


@pytest.mark.parametrize("transfer", ["nixl", "local", pytest.param("collective", marks=pytest.mark.long)])
async def test_prefill_and_decode_processes_give_exact_answers_and_survive_faults(
    tmp_path: Path, transfer: str
) -> None:
    """Check answers, a cancelled request, a stuck worker (F-11) and SIGTERM (F-47, F-48).

    All checks share the processes, because each takes seconds to load torch.
    """
    async with worker_processes(tmp_path) as processes:
        shared = {"transfer": transfer, "workers_on_host": 3}
        stuck = {"BATON_FAILPOINTS": f"sequence_step[token={MARKER}]=sleep:60"}
        p, q, d = await processes.start_workers(
            ("p", {**shared, "role": "prefill"}, {}),
            ("q", {**shared, "role": "prefill", "max_num_batched_tokens": 64, "step_limit_s": 1.5}, stuck),
            ("d", {**shared, "role": "decode"}, {}),
        )
        processes.scheduler.send("d", WorkerCommand(kind=CommandKind.CONNECT, peer=p.ref))
        to_p, to_q, to_d = [await connect_gateway(processes, worker) for worker in (p, q, d)]
        await _check_exact_answers(p, d, to_p, to_d)
        await _check_cancelled_request_frees_all_blocks(processes, p, d, to_p, to_d)
        await _check_stuck_worker_exits_and_is_blamed(processes, q, d, to_q, to_d)
        await _check_sigterm_finishes_running_requests(processes, p, d, to_p, to_d)


async def _check_exact_answers(p: WorkerProcess, d: WorkerProcess, to_p: Gateway, to_d: Gateway) -> None:
    jobs = [job_pair(p, d, number, prompt(number, length)) for number, length in enumerate(LENGTHS)]
    for prefill, decode in jobs:
        to_p.send(prefill)
        to_d.send(decode)
    for prefill, decode in jobs:
        deltas = await to_d.ended(decode.job)
        answer = to_d.tokens(decode.job)
        assert len(answer) == 12
        assert to_p.tokens(prefill.job) == answer[:1]
        check_exact(decode.token_ids, answer, [logprobs.logprob for delta in deltas for logprobs in delta.logprobs])
        timeline = deltas[-1].timeline
        assert timeline is not None
        assert timeline.kv_bytes > 0
        assert timeline.transport


async def _check_cancelled_request_frees_all_blocks(
    processes: WorkerProcesses, p: WorkerProcess, d: WorkerProcess, to_p: Gateway, to_d: Gateway
) -> None:
    for number in range(100, 100 + MAX_TRIALS):  # if this process stands still, a job may end before its cancel
        sampling = Sampling(max_tokens=500, ignore_eos=True)
        prefill, decode = job_pair(p, d, number, prompt(number, 1500), sampling=sampling)
        to_p.send(prefill)
        to_d.send(decode)
        await asyncio.sleep(0.1)
        to_p.send(Cancel(job=prefill.job, reason=Reason.CANCELLED))
        to_d.send(Cancel(job=decode.job, reason=Reason.CANCELLED))
        failures, job = to_d.failures, decode.job
        await to_d.until(lambda failures=failures, job=job: failures[job] or to_d.finishes(job))
        if failures[job]:
            break
    assert [failure.reason for failure in failures[job]] == [Reason.CANCELLED]
    for worker_id in ("p", "d"):
        await processes.latest_clean(worker_id)


async def _check_stuck_worker_exits_and_is_blamed(
    processes: WorkerProcesses, q: WorkerProcess, d: WorkerProcess, to_q: Gateway, to_d: Gateway
) -> None:
    tokens = prompt(202, 300)
    tokens[200] = MARKER
    prefill, decode = job_pair(q, d, 202, tokens)
    to_q.send(prefill)
    to_d.send(decode)
    await processes.report("q", WorkerState.UNHEALTHY, may_have_ended=True)
    assert await q.exit_code(60.0) == UNHEALTHY_EXIT_CODE
    failure = await to_d.failed(decode.job)
    assert failure.retriable
    assert failure.blamed == q.ref
    await processes.latest_clean("d")


async def _check_sigterm_finishes_running_requests(
    processes: WorkerProcesses, p: WorkerProcess, d: WorkerProcess, to_p: Gateway, to_d: Gateway
) -> None:
    prefill, decode = job_pair(
        p, d, 201, prompt(201, 700), sampling=Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    )
    to_p.send(prefill)
    to_d.send(decode)
    await to_p.ended_prefill(prefill.job)
    p.signal(signal.SIGTERM)
    d.signal(signal.SIGTERM)
    await to_d.ended(decode.job)
    assert len(to_d.tokens(decode.job)) == 60
    assert await p.exit_code(60.0) == 0
    assert await d.exit_code(60.0) == 0
    await processes.report("d", WorkerState.DRAINING, may_have_ended=True)


async def test_killed_owner_is_blamed_in_a_retriable_failure(tmp_path: Path) -> None:
    """The owner stops in the middle of the prompt, so that it cannot end the job before the signal."""
    async with worker_processes(tmp_path) as processes:
        shared = {"workers_on_host": 2, "max_num_batched_tokens": 64}
        stuck = {"BATON_FAILPOINTS": f"sequence_step[token={MARKER}]=sleep:120"}
        p, d = await processes.start_workers(
            ("p", {**shared, "role": "prefill", "step_limit_s": 120}, stuck), ("d", {**shared, "role": "decode"}, {})
        )
        to_p, to_d = await connect_gateway(processes, p), await connect_gateway(processes, d)
        tokens = prompt(0, 2000)
        tokens[1500] = MARKER
        prefill, decode = job_pair(p, d, 0, tokens)
        to_p.send(prefill)
        to_d.send(decode)
        await to_d.until(lambda: processes.scheduler.reports["d"][-1].blocks.used > 0)
        p.signal(signal.SIGKILL)
        failure = await to_d.failed(decode.job)
        assert failure.retriable
        assert failure.blamed == p.ref
        await processes.latest_clean("d")
