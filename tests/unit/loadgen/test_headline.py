"""The opening sentence, its reasons, and the colours of the tiles."""

from pathlib import Path
from typing import Any

import pytest

from loadgen.measure.prefix_hits import CacheState, CacheVerdict
from loadgen.measure.records import Record
from loadgen.measure.records_file import Result
from loadgen.report.headline import headline
from loadgen.report.report_json import run_of
from loadgen.report.run_view import view
from loadgen.report.tiles import ReportTile, tiles_of
from loadgen.slo_target import SloTarget
from tests.loadgen_builders import record, refused, run

WARM = CacheVerdict(state=CacheState.WARM, num_hit_tokens=80, num_allowed_tokens=10, num_prompt_tokens=100)


def answer(index: int, ttft: float = 0.1, gap: float = 0.01, queue: float = 0.0, **changes: Any) -> Record:
    """A response due at its index, with a timeline: `queue`, then prefill for the rest of the TTFT."""
    due = float(index)
    legs = [
        {"worker_id": "p", "queue_s": queue, "compute_s": ttft - queue, "num_computed_tokens": 10},
        {"worker_id": "d", "kv_exposed_s": 0.001, "kv_bytes": 10, "decode_s": 2 * gap},
    ]
    tokens = (due + ttft, due + ttft + gap, due + ttft + 2 * gap)
    return record(index, tokens=tokens, intended_s=due, sent_s=due, timeline={"attempts": 1, "legs": legs}, **changes)


def entry(
    *records: Record, slo: str = "ttft=500ms,tpot=50ms", cache: CacheVerdict | None = None, **changes: Any
) -> Any:
    slos = {"default": SloTarget.parse(slo)} if slo else {"default": SloTarget()}
    info = run(num_offered=len(records), slos=slos, **changes)
    return run_of(view(Result(path=Path("r"), run=info, records=records), name="r", cache=cache))


def test_sentence_says_what_was_missed_and_where() -> None:
    slow = [answer(i, gap=0.2) for i in range(1, 27)]
    assert headline([entry(answer(0), *slow)]) == (
        "3.7 % of 27 requests met the SLO; 96.3 % missed TPOT, mostly in decode."
    )
    queued = entry(answer(0), answer(1, ttft=2.0, queue=1.5), answer(2, ttft=2.0, queue=1.5, gap=0.2))
    assert headline([queued]) == (
        "33 % of 3 requests met the SLO; 67 % missed TTFT, mostly in the queue; 33 % missed TPOT, mostly in decode."
    )
    assert [(miss["slo"], miss["missed"], miss["stage"]) for miss in queued["misses"]] == [
        ("ttft", 2, "queue"),
        ("tpot", 1, "decode"),
    ]
    assert queued["misses"][0]["stage_share"] == pytest.approx(0.75)


def test_sentence_names_no_stage_without_a_timeline() -> None:
    late = record(0, tokens=(2.5, 2.6, 2.7), sent_s=1.0)
    assert headline([entry(late)]) == "0 % of 1 request met the SLO; 100 % missed TTFT; 100 % missed TPOT."


def test_sentence_counts_requests_without_a_response() -> None:
    without = (refused(1, sent_s=1.0), refused(2, 2.0, sent_s=1.0), record(3, tokens=(), sent_s=1.0, timed_out=True))
    found = headline([entry(answer(1), *without)])
    assert found == "25 % of 4 requests met the SLO; 50 % were rejected; 25 % timed out."


def test_sentence_without_slo_counts_completed_requests() -> None:
    assert headline([entry(answer(1), refused(1, sent_s=1.0), slo="")]) == (
        "50 % of 2 requests completed; no SLO was set; 50 % were rejected."
    )


def test_sentence_begins_with_the_doubt() -> None:
    assert headline([entry(answer(0), cache=WARM)]) == "Warm cache: 100 % of 1 request met the SLO."
    doubtful = entry(answer(0), cache=WARM, invalid=("late",))
    assert headline([doubtful]) == "Invalid run: 100 % of 1 request met the SLO."


def test_sentence_of_several_runs_has_their_range() -> None:
    good, bad = entry(answer(0)), entry(answer(0), answer(1, gap=0.2), invalid=("late",), cache=WARM)
    assert headline([good | {"name": "a"}, bad | {"name": "b"}]) == (
        "SLO attainment is between 50 % (b) and 100 % (a) in 2 runs; 1 is invalid."
    )
    assert headline([good, good | {"verdict": "warm"}]) == (
        "SLO attainment is 100 % in all 2 runs; 1 is measured with a warm cache."
    )


def tiles(*records: Record, **changes: Any) -> dict[str, ReportTile]:
    return {tile.name: tile for tile in tiles_of(entry(*records, **changes))}


def test_tiles_are_red_where_they_miss_the_slo() -> None:
    fine = tiles(*(answer(i) for i in range(9)))
    assert {tile.color for tile in fine.values()} == {""}
    assert not any(tile.is_more_bad for tile in fine.values())
    assert fine["TTFT p50"].more == "p99 100 ms · SLO 500 ms"
    tail = tiles(*(answer(i) for i in range(19)), answer(19, ttft=3.0))
    assert (tail["TTFT p50"].color, tail["TTFT p50"].is_more_bad) == ("", True)
    assert tail["SLO attainment"].color == "", "95 % is above the usual goal"
    slow = tiles(*(answer(i, gap=0.2) for i in range(9)))
    assert (slow["TPOT p50"].color, slow["TPOT p50"].is_more_bad) == ("bad", True)
    assert (slow["TTFT p50"].color, slow["SLO attainment"].color) == ("", "bad")


def test_tiles_use_the_slo_of_each_class() -> None:
    slos = {"fast": SloTarget.parse("ttft=50ms"), "batch": SloTarget.parse("ttft=9s")}
    records = (answer(0, slo_class="batch"), answer(1, slo_class="batch"), answer(2, ttft=0.04, slo_class="fast"))

    def color(*rows: Record) -> str:
        info = run(num_offered=len(rows), slos=slos)
        found = tiles_of(run_of(view(Result(path=Path("r"), run=info, records=rows), name="r")))
        return next(tile.color for tile in found if tile.name == "TTFT p50")

    assert color(*records) == "", "100 ms misses the SLO of the other class only"
    assert color(*records[:2], answer(2, ttft=0.06, slo_class="fast")) == "bad"


def test_prefix_tile_is_amber_for_a_warm_cache() -> None:
    warm = tiles(answer(0), cache=WARM)["Prefix hits"]
    assert (warm.color, warm.more) == ("warn", "warm cache; a cold one allows 10.0 %")
