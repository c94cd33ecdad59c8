"""Predicted pulls contain the fixed cost that their link has measured, and the first dial of a pair."""

from dataclasses import replace

import pytest

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.state.worker_links import DEFAULT_DIAL_S, DEFAULT_PULL_S, LinkArrays
from tests.unit.scheduler.measured_workers import LAYOUT, decoding, fast_link, measured, queued, seen
from tests.unit.scheduler.policy_cases import asked, busy, chosen, ids, predicted

BYTES_S = 200 * LAYOUT.block_bytes / 1e9
HOLDER = measured("h", "prefill", **queued(50_000))


def pulled(*, blocks: int = 200, **costs: float) -> Choice:
    """The choice if a busy worker holds `blocks` of a prompt, and an idle one has a link with these costs."""
    p = measured("p", "prefill", links=(fast_link("h", **costs),))
    return chosen(seen(p, HOLDER, busy(), h=blocks))


def terms_of(choice: Choice, worker_id: str) -> dict[str, float]:
    return next(c.terms for c in choice.candidates if c.worker.worker_id == worker_id and c.side == "prefill")


def test_a_pull_costs_its_bytes_and_what_the_link_has_measured() -> None:
    got = pulled(pull_s=0.03, dial_s=0.2)
    assert predicted(got).prefix_pull_s == pytest.approx(BYTES_S + 0.03), "the pair is connected"
    shown = terms_of(got, "p")
    assert (shown["pull_fixed_s"], shown["dial_s"]) == (0.03, 0.0)
    assert shown["prefix_pull_s"] == pytest.approx(BYTES_S + 0.03)


def test_a_short_prefix_is_computed_if_the_pull_costs_more_than_computing_it() -> None:
    assert pulled(blocks=4, pull_s=0.001).prefix_source is not None
    assert pulled(blocks=4, pull_s=0.1).prefix_source is None
    assert pulled(blocks=200, pull_s=0.1).prefix_source is not None


def test_the_first_pull_of_a_pair_is_charged_the_dial_of_its_reader() -> None:
    other = fast_link("x", pull_s=0.004, dial_s=0.05)
    p = measured("p", "prefill", links=(other,))
    x = measured("x", "prefill", **queued(50_000))
    got = chosen(seen(p, HOLDER, x, busy(), h=200))
    assert predicted(got).prefix_pull_s == pytest.approx(BYTES_S + 0.004 + 0.05)
    assert terms_of(got, "p")["dial_s"] == 0.05
    connected = replace(p, links=(other, fast_link("h")))
    assert predicted(chosen(seen(connected, HOLDER, x, busy(), h=200))).prefix_pull_s == pytest.approx(BYTES_S + 0.004)


def test_a_reader_without_measurements_is_charged_assumed_costs() -> None:
    got = chosen(seen(measured("p", "prefill"), HOLDER, busy(), h=200))
    assert predicted(got).prefix_pull_s == pytest.approx(BYTES_S + DEFAULT_PULL_S + DEFAULT_DIAL_S)


def test_a_restarted_source_is_dialed_again_at_the_cost_of_its_pair() -> None:
    got = pulled(pull_s=0.004, dial_s=0.0)
    assert terms_of(got, "p")["dial_s"] == 0.0
    old = fast_link("h", epoch=2, pull_s=0.004, dial_s=0.07)
    restarted = chosen(seen(measured("p", "prefill", links=(old,)), HOLDER, busy(), h=200))
    assert terms_of(restarted, "p")["dial_s"] == 0.07
    dialing = fast_link("h", bytes_per_s=0.0, pull_s=0.0)
    still = chosen(seen(measured("p", "prefill", links=(dialing,)), HOLDER, busy(), h=200))
    assert terms_of(still, "p")["dial_s"] == DEFAULT_DIAL_S, "the connection is not there yet"


def test_local_prefill_is_charged_the_same() -> None:
    d = measured("d", "decode", links=(fast_link("h", pull_s=0.02),))
    got = chosen(seen(HOLDER, d, h=200))
    assert (ids(got), predicted(got).prefix_pull_s) == ((None, "d"), pytest.approx(BYTES_S + 0.02))
    assert terms_of(got, "d")["pull_fixed_s"] == 0.02
    costly = replace(d, links=(fast_link("h", pull_s=5.0),))
    assert chosen(seen(HOLDER, costly, h=200)).prefix_source is None


def test_the_transfer_of_a_prompt_is_charged_its_exposed_cost() -> None:
    p0, p1 = measured("p0", "prefill"), measured("p1", "prefill", **queued(100))
    links = (fast_link("p0", exposed_s=0.5), fast_link("p1", exposed_s=0.001))
    got = chosen(seen(p0, p1, busy(links=links)))
    assert ids(got) == ("p1", "d")
    even = tuple(replace(link, exposed_s=0.01) for link in links)
    assert ids(chosen(seen(p0, p1, busy(links=even)))) == ("p0", "d")
    assert terms_of(chosen(seen(p0, p1, busy(links=even))), "p0")["transfer_s"] >= 0.01


def test_a_dial_is_hidden_behind_queue_and_prefill() -> None:
    """Both workers start at the same time, so only what is left of the dial is exposed."""
    d = busy(links=(fast_link("p", epoch=2, exposed_s=0.001, dial_s=0.3),))
    long, short = (
        terms_of(chosen(seen(measured("p", "prefill"), d), asked(tokens)), "p")["transfer_s"] for tokens in (4096, 64)
    )
    assert long < 0.01
    assert short == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_reported_cost_that_is_no_time_is_not_used(seconds: float) -> None:
    bad = fast_link("h", pull_s=seconds, exposed_s=seconds, dial_s=seconds)
    views = [WorkerView(report=measured("d", "decode", links=(bad,), **decoding(1))), WorkerView(report=HOLDER)]
    links = LinkArrays(views, {"d": 0, "h": 1}).links
    assert (links.pull_s[0, 1], links.dial_s[0, 1]) == (DEFAULT_PULL_S, 0.0)
