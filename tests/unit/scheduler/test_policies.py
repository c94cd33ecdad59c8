"""Rules that every policy must follow, and the behaviour of the baselines."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.cluster.placement import Rejection
from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import Reason
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.scheduler_settings import PolicySettings
from baton.scheduler.policies import POLICIES, Policy
from baton.scheduler.policies.policy_types import Choice, PolicyContext
from tests.builders import blocks, cluster, layout, link, query, worker_ref, worker_report


def choose(policy: Policy, *args: object, number: int = 0) -> Choice:
    answer = policy(*args, PolicyContext(number=number, seed=0))  # type: ignore[arg-type]
    assert isinstance(answer, Choice), answer
    return answer


def ids(choice: Choice) -> tuple[str | None, str | None]:
    return (choice.prefill.worker_id if choice.prefill else None, choice.decode.worker_id if choice.decode else None)


def test_the_setting_offers_exactly_the_registered_policies() -> None:
    (setting,) = (each for each in settings_of(PolicySettings) if each.name == "policy")
    assert setting.choices == tuple(POLICIES), (
        "add the name to PolicySettings.policy and run `python tools/gen_chart.py`"
    )


every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@every_policy
def test_prefill_and_decode_run_on_workers_of_their_role(policy: Policy) -> None:
    assert ids(choose(policy, query(), cluster(worker_report("p", "prefill"), worker_report("d", "decode")))) == (
        "p",
        "d",
    )


@every_policy
def test_hybrid_worker_prefills_its_own_prompt(policy: Policy) -> None:
    assert ids(choose(policy, query(), cluster(worker_report("h", "hybrid")))) == (None, "h")


@every_policy
def test_single_token_request_needs_no_decode_worker(policy: Policy) -> None:
    both = cluster(worker_report("p", "prefill"), worker_report("d", "decode"))
    assert ids(choose(policy, query(max_tokens=1), both)) == ("p", None)
    assert ids(choose(policy, query(max_tokens=9, num_output_tokens=8), both)) == ("p", None)


@every_policy
def test_single_token_request_needs_a_prefill_worker(policy: Policy) -> None:
    assert ids(choose(policy, query(max_tokens=1), cluster(worker_report("p", "prefill")))) == ("p", None)
    answer = policy(query(max_tokens=1), cluster(worker_report("d", "decode")), PolicyContext(number=0, seed=0))
    assert isinstance(answer, Rejection)
    assert answer.term == "prefill"


@every_policy
def test_decode_worker_prefills_without_a_prefill_worker(policy: Policy) -> None:
    assert ids(choose(policy, query(), cluster(worker_report("d", "decode")))) == (None, "d")


@every_policy
def test_request_is_rejected_without_a_decode_worker(policy: Policy) -> None:
    answer = policy(query(), cluster(worker_report("p", "prefill")), PolicyContext(number=0, seed=0))
    assert isinstance(answer, Rejection)
    assert answer.reason is Reason.NO_WORKERS
    assert answer.retry_after_s > 0


@every_policy
def test_workers_with_different_layouts_are_never_paired(policy: Policy) -> None:
    other = worker_report("p", "prefill", layout=layout(model_fingerprint="model-b"))
    assert ids(choose(policy, query(), cluster(other, worker_report("d", "decode")))) == (None, "d")


@every_policy
def test_broken_link_is_not_used(policy: Policy) -> None:
    decode = worker_report("d", "decode", links=(link("p0", broken=True), link("p1")))
    chosen = choose(policy, query(), cluster(worker_report("p0", "prefill"), worker_report("p1", "prefill"), decode))
    assert ids(chosen) == ("p1", "d")


@every_policy
@pytest.mark.parametrize("order", [1, -1])
def test_a_link_to_an_earlier_incarnation_says_nothing_of_the_present_one(policy: Policy, order: int) -> None:
    links = (link("p0", broken=True), link("p0", epoch=7))[::order]
    prefill = (worker_report("p0", "prefill"), worker_report("p1", "prefill"))
    broken = worker_report("d", "decode", links=(*links, link("p1")))
    assert ids(choose(policy, query(), cluster(*prefill, broken))) == ("p1", "d")
    links = (link("p0"), link("p0", epoch=7, broken=True))[::order]
    working = worker_report("d", "decode", links=(*links, link("p1", broken=True)))
    assert ids(choose(policy, query(), cluster(*prefill, working))) == ("p0", "d")


@every_policy
def test_warm_pairs_are_preferred(policy: Policy) -> None:
    decode = worker_report("d", "decode", links=(link("p1"), link("p0", epoch=7)))
    chosen = choose(policy, query(), cluster(worker_report("p0", "prefill"), worker_report("p1", "prefill"), decode))
    assert ids(chosen) == ("p1", "d"), "p0 is warm only for an epoch that has ended"


@every_policy
def test_avoided_workers_are_used_only_if_no_other_is_left(policy: Policy) -> None:
    workers = [worker_report("p0", "prefill"), worker_report("p1", "prefill"), worker_report("d", "decode")]
    assert ids(choose(policy, query(avoid=(worker_ref("p0"),)), cluster(*workers)))[0] == "p1"
    assert ids(choose(policy, query(avoid=(worker_ref("p0"), worker_ref("p1"))), cluster(*workers)))[0] in ("p0", "p1")


@every_policy
@given(seed=st.integers(0, 10_000))
def test_no_policy_chooses_a_worker_that_cannot_serve(policy: Policy, seed: int) -> None:
    random = Random(seed)
    reports = [
        worker_report(
            f"w{i}",
            random.choice(["prefill", "decode", "hybrid"]),
            state=random.choice(list(WorkerState)),
            model=random.choice(["demo", "other"]),
            blocks=blocks(total=random.choice([5, 100])),
        )
        for i in range(random.randrange(6))
    ]
    snapshot = cluster(*reports)
    answer, again = (policy(query(), snapshot, PolicyContext(number=seed, seed=seed)) for _ in range(2))
    assert answer == again, "equal inputs, equal answers"
    if isinstance(answer, Rejection):
        return
    assert answer.prefill is None or answer.decode is None or answer.prefill.worker_id != answer.decode.worker_id
    for worker in (answer.prefill, answer.decode):
        if worker is not None:
            assert worker.report.state is WorkerState.READY
            assert worker.report.model == "demo"
            assert worker.report.blocks.total == 100


def test_round_robin_goes_through_the_workers() -> None:
    four = cluster(*(worker_report(f"{r[0]}{i}", r) for r in ("prefill", "decode") for i in (0, 1)))
    assert [ids(choose(POLICIES["round_robin"], query(), four, number=n)) for n in range(3)] == [
        ("p0", "d0"),
        ("p1", "d1"),
        ("p0", "d0"),
    ]


def test_random_uses_all_workers_and_only_its_seed_decides() -> None:
    four = cluster(*(worker_report(f"{r[0]}{i}", r) for r in ("prefill", "decode") for i in (0, 1)))

    def draw(number: int) -> list[tuple[str | None, str | None]]:
        answers = [POLICIES["random"](query(), four, PolicyContext(number=number, seed=seed)) for seed in range(50)]
        return [ids(answer) for answer in answers if isinstance(answer, Choice)]

    drawn = draw(0)
    assert set(drawn) == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}
    assert len(drawn) == 50
    assert drawn == draw(9)


def test_least_loaded_follows_tokens_and_sequences() -> None:
    busy_p, idle_p = (
        worker_report("p0", "prefill", waiting_prefill_tokens=500),
        worker_report("p1", "prefill", waiting_prefill_tokens=10),
    )
    busy_d, idle_d = worker_report("d0", "decode", running_seqs=7), worker_report("d1", "decode", running_seqs=1)
    assert ids(choose(POLICIES["least_loaded"], query(), cluster(busy_p, idle_p, busy_d, idle_d))) == ("p1", "d1")


def test_least_loaded_prefers_free_blocks_to_fewer_sequences() -> None:
    full = worker_report("d0", "decode", blocks=blocks(total=100, used=99))
    roomy = worker_report("d1", "decode", running_seqs=5)
    assert ids(choose(POLICIES["least_loaded"], query(), cluster(worker_report("p", "prefill"), full, roomy))) == (
        "p",
        "d1",
    )


def test_least_loaded_counts_reservations() -> None:
    snapshot = cluster(worker_report("p0", "prefill"), worker_report("p1", "prefill"), worker_report("d", "decode"))
    placed = replace(
        snapshot,
        workers=tuple(replace(w, reserved_prefill_tokens=40 * (w.worker_id == "p0")) for w in snapshot.workers),
    )
    assert ids(choose(POLICIES["least_loaded"], query(), placed)) == ("p1", "d")


@every_policy
def test_begun_answer_continues_with_the_same_weights(policy: Policy) -> None:
    old, new = worker_report("w0"), worker_report("w1")
    new = replace(new, layout=replace(new.layout, model_fingerprint="other weights"))
    for report, name in ((old, "w0"), (new, "w1")):
        answer = policy(
            query(attempt=1, model_fingerprint=report.layout.model_fingerprint),
            cluster(old, new),
            PolicyContext(number=0, seed=0),
        )
        assert isinstance(answer, Choice)
        assert [w.worker_id for w in (answer.prefill, answer.decode) if w] == [name]
    gone = policy(query(attempt=1, model_fingerprint="third"), cluster(old, new), PolicyContext(number=0, seed=0))
    assert isinstance(gone, Rejection)
    assert gone.reason is Reason.NO_WORKERS
