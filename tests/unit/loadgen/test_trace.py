"""Plans from traces: the same requests, lengths and sharing, and times that are only scaled."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.cache_model import best_hits
from loadgen.plan.plan import Generated
from loadgen.plan.plan_check import check_plan
from loadgen.plan.prompt_tokens import tokens_of
from loadgen.plan.sources.trace import (
    AzureRow,
    Cut,
    MooncakeRow,
    read_azure,
    read_mooncake,
    replay_azure,
    replay_mooncake,
)
from tests.unit.loadgen.plans import plan

EXCERPT = Path(__file__).resolve().parents[2] / "data" / "mooncake_conversation_1000.jsonl.gz"


def row(timestamp_ms: int, input_length: int, *hash_ids: int, output: int = 5) -> MooncakeRow:
    return MooncakeRow(timestamp_ms=timestamp_ms, input_length=input_length, output_length=output, hash_ids=hash_ids)


def test_planned_excerpt_equals_the_trace() -> None:
    """Requests, lengths and infinite-cache hits, from the file on one side and from the plan on the other."""
    with gzip.open(EXCERPT) as file:
        raw = [json.loads(line) for line in file]
    planned = plan(*replay_mooncake(read_mooncake(EXCERPT), seed=1).requests)
    check_plan(planned)
    assert len(planned.requests) == len(raw) == 1000
    assert [planned.num_prompt_tokens(r) for r in planned.requests] == [line["input_length"] for line in raw]
    assert [r.output_tokens for r in planned.requests] == [line["output_length"] for line in raw]

    seen: set[int] = set()
    hits = []
    num_hit_blocks = 0
    for line in raw:
        leading = 0
        for id_ in line["hash_ids"]:
            if id_ not in seen:
                break
            leading += 1
        seen.update(line["hash_ids"])
        num_hit_blocks += leading
        hits.append(min(512 * leading, line["input_length"]))
    use = best_hits(planned)
    assert list(use.num_shared_tokens) == hits
    assert sum(use.num_shared_tokens) / sum(use.num_prompt_tokens) == pytest.approx(0.21574223, abs=1e-8)
    assert num_hit_blocks / sum(len(line["hash_ids"]) for line in raw) == pytest.approx(0.21208570, abs=1e-8)


def test_tokens_are_shared_like_hash_blocks() -> None:
    """Two prompts share exactly the tokens of their common hash ids, for any vocabulary."""
    rows = read_mooncake(EXCERPT)[:60]
    planned = plan(*replay_mooncake(rows, shrink=16).requests)
    prompts = [tokens_of(planned, r, {}) for r in planned.requests]
    for a in range(0, 60, 3):
        for b in range(a + 1, 60):
            blocks = next(
                (i for i, (x, y) in enumerate(zip(rows[a].hash_ids, rows[b].hash_ids, strict=False)) if x != y), None
            )
            if blocks is None:
                continue
            common = int(np.argmin([x == y for x, y in zip(prompts[a], prompts[b], strict=False)]))
            assert common == blocks * 32


def test_partial_block_stays_partial() -> None:
    replay = replay_mooncake([row(0, 1030, 7, 8, 9), row(0, 512, 7)])
    assert replay.requests[0].segments == tuple(
        Generated(segment_id=i, num_tokens=n) for i, n in ((7, 512), (8, 512), (9, 6))
    )
    assert replay.requests[1].segments == (Generated(segment_id=7, num_tokens=512),)


def test_shrink_keeps_blocks_distinct_and_rounds_up() -> None:
    small = replay_mooncake([row(0, 1030, 7, 8, 9, output=17)], shrink=16).requests[0]
    assert small.segments == tuple(Generated(segment_id=i, num_tokens=n) for i, n in ((7, 32), (8, 32), (9, 1)))
    assert small.output_tokens == 2
    with pytest.raises(BadPlan, match="--shrink is 3; it must be a divisor of 512"):
        replay_mooncake([row(0, 5, 1)], shrink=3)


def test_ticks_are_spread_in_row_order() -> None:
    rows = read_mooncake(EXCERPT)
    at_s = np.array([r.at_s for r in replay_mooncake(rows, seed=5).requests])
    assert (np.diff(at_s) >= 0).all()
    inside = at_s - np.array([r.timestamp_ms for r in rows]) / 1e3
    assert inside.min() >= 0
    assert inside.max() <= 3.0 + 0.002
    assert np.histogram(inside, bins=6, range=(0, 3.002))[0] == pytest.approx([1000 / 6] * 6, abs=55)
    other = [r.at_s for r in replay_mooncake(rows, seed=6).requests]
    assert other != at_s.tolist()
    times = [r.at_s for r in replay_mooncake(rows, tick_s=0).requests]
    assert times == [(r.timestamp_ms - rows[0].timestamp_ms) / 1e3 for r in rows]


def test_times_scale_only_on_request() -> None:
    rows = [row(6000, 5, 1), row(9000, 5, 2), row(15000, 5, 3)]
    assert [r.at_s for r in replay_mooncake(rows, tick_s=0).requests] == [0, 3, 9]
    assert [r.at_s for r in replay_mooncake(rows, Cut(time_scale=0.5), tick_s=0).requests] == [0, 1.5, 4.5]
    assert [r.at_s for r in replay_mooncake(rows, Cut(start_s=3, time_scale=2), tick_s=0).requests] == [0, 12]
    assert [r.at_s for r in replay_mooncake(rows, Cut(start_s=0, duration_s=9), tick_s=0).requests] == [0, 3]
    with pytest.raises(BadPlan, match="time scale 0"):
        replay_mooncake(rows, Cut(time_scale=0))


def test_cut_counts_omitted_rows() -> None:
    rows = [row(0, 600, 1, 2), row(0, 5, 3, output=0), row(0, 20, 4), row(0, 10, 5), row(0, 11, 6)]
    replay = replay_mooncake(rows, Cut(max_tokens=25, limit=2))
    assert [r.segments[0].segment_id for r in replay.requests] == [4, 5]  # type: ignore[union-attr]
    assert (replay.num_too_long, replay.num_empty) == (1, 1)
    assert [r.index for r in replay.requests] == [0, 1]
    with pytest.raises(BadPlan, match="no request of the trace is left: 4 are too long, 1 are empty"):
        replay_mooncake(rows, Cut(max_tokens=3))


GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "an empty line"),
        ("{", "not JSON: Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 0}', "`input_length` is None; it must be an integer of 0 or more"),
        ('{"timestamp": -1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}', "`timestamp` is -1"),
        ('{"timestamp": 0, "input_length": "6", "output_length": 5, "hash_ids": [1, 2]}', "`input_length` is '6'"),
        ('{"timestamp": 0, "input_length": 6.5, "output_length": 5, "hash_ids": [1]}', "`input_length` is 6.5"),
        ('{"timestamp": 0, "input_length": 600, "output_length": true, "hash_ids": [1, 2]}', "`output_length` is True"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, "2"]}',
            "`hash_ids` must be a list of integers",
        ),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}',
            "1 hash ids for 600 tokens; one for each 512 tokens would be 2",
        ),
    ],
)
def test_invalid_mooncake_rows_are_rejected(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(BadPlan) as caught:
        read_mooncake(path)
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_rows_must_be_sorted_and_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD.replace("0,", "7,", 1) + "\n" + GOOD)
    with pytest.raises(BadPlan, match=r"trace\.jsonl:2: `timestamp` 0 is before 7 in the previous row"):
        read_mooncake(path)
    path.write_text("")
    with pytest.raises(BadPlan, match="the trace is empty"):
        read_mooncake(path)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_azure_times_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        AZURE
        + "2023-11-16 23:59:59.9799600,4808,10\r\n2023-11-17 00:00:00.0000001,3180,8\r\n"
        + "2024-05-10 00:00:00.009930+00:00,5,1\n2024-05-10T00:00:01,6,2"
    )
    rows = read_azure(path)
    assert [r.ticks - rows[0].ticks for r in rows[:2]] == [0, 200_401]
    assert rows[3].ticks - rows[2].ticks == 9_900_700
    replay = replay_azure(rows)
    check_plan(plan(*replay.requests))
    assert [(r.at_s, r.output_tokens) for r in replay.requests][:2] == [(0, 10), (0.02004, 8)]
    assert [r.segments for r in replay.requests][:2] == [
        (Generated(segment_id=0, num_tokens=4808),),
        (Generated(segment_id=1, num_tokens=3180),),
    ]


def test_azure_trace_is_cut_at_its_limits() -> None:
    rows = [AzureRow(ticks=10_000_000 * s, input_length=10 * s, output_length=1) for s in range(6)]
    replay = replay_azure(rows, Cut(start_s=1, duration_s=4, time_scale=0.5, max_tokens=31))
    assert [(r.index, r.at_s) for r in replay.requests] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert (replay.num_too_long, replay.num_empty) == (1, 0)
    assert len(replay_azure(rows, Cut(limit=2)).requests) == 2
    assert replay_azure(rows).num_empty == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("TIME,ContextTokens,GeneratedTokens\n", "1: no column `TIMESTAMP`"),
        (AZURE, " the trace is empty"),
        (AZURE + "yesterday,5,5\n", "2: `yesterday` is not a time such as 2023-11-16 18:17:03.9799600"),
        (AZURE + "2023-13-16 18:17:03,5,5\n", "2: `2023-13-16 18:17:03` is not a time"),
        (AZURE + "2023-11-16 18:17:03,5\n", "2: 2 cells in"),
        (AZURE + "2023-11-16 18:17:03,5,-1\n", "2: `-1` is not a number of tokens"),
        (AZURE + "2023-11-16 18:17:03,5,1\n\n", "3: an empty line"),
        (
            AZURE + "2023-11-16 18:17:03,5,1\n2023-11-16 18:17:02,5,1\n",
            "3: 2023-11-16 18:17:02 is before the time in the previous row",
        ),
    ],
)
def test_invalid_azure_rows_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(content)
    with pytest.raises(BadPlan) as caught:
        read_azure(path)
    assert str(caught.value).startswith(f"{path}:{message}")
