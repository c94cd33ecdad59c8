"""Jobs that an attempt builds from a placement."""

from dataclasses import replace

import pytest

from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import PrefixSource
from baton.core.request import NO_SLO, GenerateRequest, Sampling, SessionHints, Slo
from baton.gateway.request.attempt import Attempt
from tests import builders

SOURCE = PrefixSource(worker=builders.worker_ref("h"), num_blocks=3)


def request(slo: Slo = NO_SLO) -> GenerateRequest:
    return GenerateRequest(
        request_id=b"r",
        model="m",
        token_ids=token_ids((1, 2)),
        num_prompt_tokens=2,
        sampling=Sampling(max_tokens=8),
        received_s=0.0,
        deadline_s=60.0,
        slo=slo,
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "computes"),
    [("p", "d", "prefill"), ("p", None, "prefill"), (None, "d", "decode"), ("d", "d", "decode")],
    ids=["handoff", "first token only", "local", "one worker on both sides"],
)
def test_job_that_computes_the_prompt_gets_the_prefix_source(
    prefill: str | None, decode: str | None, computes: str
) -> None:
    jobs = Attempt(request=request(), number=0).jobs(
        builders.placement(prefill, decode, prefix_source=SOURCE), now_s=0.0
    )
    sources = {
        name: job.prefix_source for name, job in zip(("prefill", "decode"), jobs, strict=True) if job is not None
    }
    assert sources.pop(computes) == SOURCE
    assert set(sources.values()) <= {None}


@pytest.mark.parametrize(
    ("hints", "of_prefill"),
    [
        (SessionHints(retain_s=60.0, next_in_s=30.0), SessionHints(retain_s=62.5, next_in_s=32.5)),
        (SessionHints(retain_s=0.0), SessionHints(retain_s=0.0)),
        (SessionHints(), SessionHints()),
    ],
)
def test_hints_of_a_prefill_job_count_the_predicted_rest_of_the_answer(
    hints: SessionHints, of_prefill: SessionHints
) -> None:
    placement = builders.placement("p", "d", answer_s=2.5)
    asked = replace(request(), retain_s=hints.retain_s, next_in_s=hints.next_in_s)
    jobs = Attempt(request=asked, number=0).jobs(placement, now_s=0.0)
    assert [job.hints for job in jobs if job is not None] == [of_prefill, hints]


@pytest.mark.parametrize(("slo", "tpot_slo_s"), [(Slo(ttft_s=1.0, tpot_s=0.05), 0.05), (Slo(ttft_s=1.0), 0.0)])
def test_both_jobs_carry_the_tpot_slo(slo: Slo, tpot_slo_s: float) -> None:
    jobs = Attempt(request=request(slo), number=0).jobs(builders.placement("p", "d"), now_s=0.0)
    assert [job.tpot_slo_s for job in jobs if job is not None] == [tpot_slo_s, tpot_slo_s]


def test_jobs_say_how_long_the_first_token_has_been_awaited() -> None:
    """Once the client has tokens, its TTFT is over, whatever a retry takes."""
    asked = request(Slo(ttft_s=1.0))
    waiting, continued = (
        Attempt(request=replace(asked, token_ids=token_ids), number=1).jobs(
            builders.placement("p", "d"), now_s=asked.received_s + 0.3
        )[1]
        for token_ids in (asked.token_ids, asked.token_ids + asked.token_ids[:1])
    )
    assert waiting is not None
    assert continued is not None
    assert (waiting.ttft_slo_s, waiting.waited_s) == (1.0, pytest.approx(0.3))
    assert (continued.ttft_slo_s, continued.waited_s) == (0.0, 0.0)
