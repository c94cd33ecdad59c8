"""Plan files: equal plans have equal bytes, and invalid files are rejected with the line."""

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import AnswerOf, Exact, Generated, Plan, PlannedRequest, Segment, Text, Vocabulary
from loadgen.plan.plan_check import check_plan
from loadgen.plan.plan_file import (
    hash_of,
    plan_hash,
    plan_lines,
    read_plan,
    request_from_json,
    request_to_json,
    write_plan,
)
from loadgen.slo_target import SloTarget
from tests.unit.loadgen.plans import chat_plan, plan, request


@pytest.mark.parametrize("name", ["plan.jsonl", "plan.jsonl.gz"])
def test_written_plan_is_read_back(tmp_path: Path, name: str) -> None:
    written = chat_plan(
        slos={"default": SloTarget(ttft_s=0.5, tpot_s=0.05)},
        made_by={"source": "test", "n": [1, 2.5, None]},
        ignore_eos=False,
        seed=7,
    )
    sha256 = write_plan(written, tmp_path / name)
    assert read_plan(tmp_path / name) == written
    assert plan_hash(tmp_path / name) == sha256 == hash_of(written)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_hash_covers_the_uncompressed_bytes(tmp_path: Path) -> None:
    write_plan(chat_plan(), tmp_path / "a.jsonl")
    sha256 = write_plan(chat_plan(), tmp_path / "a.jsonl.gz")
    assert sha256 == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == (tmp_path / "a.jsonl").read_bytes()


def test_equal_plans_are_equal_gzip_files(tmp_path: Path) -> None:
    write_plan(chat_plan(), tmp_path / "a.jsonl.gz")
    write_plan(chat_plan(), tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert (tmp_path / "a.jsonl.gz").read_bytes()[3:8] == bytes(5), "neither the file's name nor the time"


def test_plan_bytes_are_fixed() -> None:
    """Changed bytes would change the hash of every old plan and require another FORMAT."""
    small = plan(
        request(0, (17, 512), [12, 99], output=64, session="ü", tenant="a", priority=-1, at_s=0.25),
        request(1, "line\n", output=2, at_s=1, cancel_after_tokens=1),
        request(2, (17, 512), 0, output=3, session="ü", turn=1, after=0, think_s=1e-6),
        slos={"default": SloTarget(ttft_s=0.5)},
        made_by={"b": 1, "a": 2},
    )
    assert b"".join(plan_lines(small)).decode() == (
        '{"format":1,"ignore_eos":true,"made_by":{"a":2,"b":1},"name":"test","num_requests":3,'
        '"seed":0,"slos":{"default":{"ttft_s":0.5}},'
        '"vocabulary":{"excluded":[],"high":4096,"low":3}}\n'
        '{"at_s":0.25,"index":0,"output_tokens":64,"priority":-1,'
        '"segments":[{"id":17,"num_tokens":512},{"token_ids":[12,99]}],'
        '"session":"\\u00fc","tenant":"a"}\n'
        '{"at_s":1.0,"cancel_after_tokens":1,"index":1,"output_tokens":2,"segments":[{"text":"line\\n"}]}\n'
        '{"after":0,"index":2,"output_tokens":3,'
        '"segments":[{"id":17,"num_tokens":512},{"answer_of":0}],"session":"\\u00fc","think_s":1e-06,"turn":1}\n'
    )


SEGMENTS: st.SearchStrategy[Segment] = st.one_of(
    st.builds(Generated, segment_id=st.integers(0, 2**63 - 1), num_tokens=st.integers(1, 10**6)),
    st.builds(Exact, token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple)),
    st.builds(Text, text=st.text(min_size=1), role=st.sampled_from(["user", "assistant", "system"])),
    st.builds(AnswerOf, index=st.integers(0, 100)),
)
REQUESTS = st.builds(
    PlannedRequest,
    index=st.integers(0, 10**6),
    segments=st.lists(SEGMENTS, min_size=1, max_size=5).map(tuple),
    output_tokens=st.integers(1, 10**6),
    at_s=st.none() | st.floats(0, 1e9),
    after=st.none() | st.integers(0, 10**6),
    think_s=st.floats(0, 1e6),
    session=st.text(),
    turn=st.integers(0, 100),
    tenant=st.text(),
    priority=st.integers(-100, 100),
    slo_class=st.text(),
    cancel_after_tokens=st.none() | st.integers(1, 10**6),
)


@given(REQUESTS)
def test_request_round_trip_through_json(planned: PlannedRequest) -> None:
    assert request_from_json(json.loads(json.dumps(request_to_json(planned)))) == planned


def test_handwritten_plan_is_read(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in plan_lines(chat_plan())]
    lines[1] |= {"turn": 0, "think_s": 0, "after": None, "at_s": 0}
    del lines[0]["vocabulary"]["excluded"]
    path = tmp_path / "plan.jsonl"
    path.write_text("\r\n".join(json.dumps(line, indent=None) for line in lines))
    assert read_plan(path) == chat_plan()
    assert plan_hash(path) == hashlib.sha256(path.read_bytes()).hexdigest() != hash_of(chat_plan())


Change = Callable[[list[dict[str, Any]]], Any]

BROKEN: list[tuple[Change, str]] = [
    # the header, line 1
    (lambda lines: lines[0].pop("format"), "{path}:1: not a plan; the first line has no `format`"),
    (lambda lines: lines[0].update(format=2), "{path}:1: the plan's format 2 is not supported; this loadgen reads 1"),
    (lambda lines: lines[0].pop("seed"), "{path}:1: the header lacks `seed`"),
    (lambda lines: lines[0].update(sede=1), "{path}:1: `sede` is not a field of the header; known are format"),
    (lambda lines: lines[0].update(seed="1"), '{path}:1: `seed` is "1"; it must be an integer'),
    (lambda lines: lines[0].update(slos={"default": {"ttft_s": -1}}), "{path}:1: `slos` is"),
    (lambda lines: lines[0].update(slos={"default": {"ttft": 1}}), "{path}:1: `ttft` is not a field of an SLO"),
    (lambda lines: lines[0].update(slos={}), "{path}:1: `slos` has no class"),
    (lambda lines: lines[0].update(vocabulary={"low": 5, "high": 5}), "{path}:1: the vocabulary is 5 to 5"),
    (
        lambda lines: lines[0].update(vocabulary={"low": 5, "high": 2**31}),
        "{path}:1: the vocabulary is 5 to 2147483648; it must have at most 16777216 ids",
    ),
    (
        lambda lines: lines[0].update(vocabulary={"low": 5, "high": 9, "excluded": [7, 6]}),
        "{path}:1: the vocabulary's `excluded` must be",
    ),
    (
        lambda lines: lines[0].update(vocabulary={"low": 5, "high": 7, "excluded": [5]}),
        "{path}:1: the vocabulary has 1 token ids",
    ),
    (lambda lines: lines[0].update(num_requests=2), "{path}:4: too many lines; the header says 2 requests"),
    (lambda lines: lines[0].update(num_requests=4), "{path}: the file ends after 3 of 4 requests"),
    # a request's keys and types
    (lambda lines: lines[2].update(segment=[]), "{path}:3: `segment` is not a field of a request; known are after"),
    (lambda lines: lines[2].pop("output_tokens"), "{path}:3: `output_tokens` is missing"),
    (lambda lines: lines[2].update(output_tokens=8.0), "{path}:3: `output_tokens` is 8.0; it must be an integer"),
    (lambda lines: lines[2].update(index=True), "{path}:3: `index` is true; it must be an integer"),
    (lambda lines: lines[2].update(at_s="1"), '{path}:3: `at_s` is "1"; it must be a number or null'),
    (lambda lines: lines[3].update(think_s=None), "{path}:4: `think_s` is null; it must be a number"),
    (lambda lines: lines[2].update(tenant=3), "{path}:3: `tenant` is 3; it must be a string"),
    (lambda lines: lines[3].update(after=0.0), "{path}:4: `after` is 0.0; it must be an integer or null"),
    (lambda lines: lines[2].update(segments={}), "{path}:3: `segments` is {{}}; it must be a list"),
    (lambda lines: lines[2].update(segments=[{"id": 1}]), '{path}:3: segment 0 is {{"id": 1}}; write one of'),
    (lambda lines: lines[2].update(segments=[{"id": 1, "num_tokens": "2"}]), "{path}:3: segment 0 is"),
    (lambda lines: lines[2].update(segments=[{"text": "a", "num_tokens": 2}]), "{path}:3: segment 0 is"),
    (lambda lines: lines[2].update(segments=[{"token_ids": [1, 2.5]}]), "{path}:3: segment 0 is"),
    (lambda lines: lines[2].update(segments=["x" * 100]), "{path}:3: segment 0 is " + '"' + "x" * 56 + "…; write"),
    # what a request means
    (lambda lines: lines[2].update(index=0), "{path}:3: `index` is 0; it must be 1"),
    (
        lambda lines: lines[2].update(at_s=-0.5),
        "{path}:3: `at_s` is -0.5; it must be 0 or more seconds from the start of the run",
    ),
    (lambda lines: lines[1].update(at_s=1.5), "{path}:3: `at_s` is 1.0, before 1.5 in an earlier line"),
    (
        lambda lines: lines[2].update(at_s=None),
        "{path}:3: a request needs either `at_s` (a first turn) or `after` (a later turn)",
    ),
    (lambda lines: lines[3].update(at_s=9), "{path}:4: a request needs either `at_s`"),
    (lambda lines: lines[2].update(think_s=1), "{path}:3: `think_s` is only allowed with `after`"),
    (lambda lines: lines[3].update(think_s=-1), "{path}:4: `think_s` is -1.0; it must be 0 or more seconds"),
    (lambda lines: lines[3].update(after=2), "{path}:4: `after` is 2; it must be an earlier request"),
    (lambda lines: lines[3].update(after=1), "{path}:4: `after` is 1, which is not in this request's session (`s`)"),
    (
        lambda lines: lines[3].update(session="t"),
        "{path}:4: `after` is 0, which is not in this request's session (`t`)",
    ),
    (lambda lines: lines[3].update(turn=0), "{path}:4: `turn` is 0; it must be above 0, the turn of request 0"),
    (lambda lines: lines[1].update(turn=-1), "{path}:2: `turn` is -1; turns are numbered from 0"),
    (lambda lines: lines[2].update(segments=[]), "{path}:3: `segments` is empty"),
    (lambda lines: lines[2].update(segments=[{"id": 1, "num_tokens": 0}]), "{path}:3: segment 0 has 0 tokens"),
    (lambda lines: lines[2].update(segments=[{"id": -1, "num_tokens": 1}]), "{path}:3: segment 0: `id` is -1"),
    (
        lambda lines: lines[2].update(segments=[{"id": 2**63, "num_tokens": 1}]),
        "{path}:3: segment 0: `id` is 9223372036854775808; with this voc",
    ),
    (lambda lines: lines[2].update(segments=[{"token_ids": []}]), "{path}:3: segment 0 has no tokens"),
    (
        lambda lines: lines[2].update(segments=[{"token_ids": [5, -1]}]),
        "{path}:3: segment 0: token ids must be from 0 to 2147483647",
    ),
    (lambda lines: lines[2].update(segments=[{"text": ""}]), "{path}:3: segment 0: the text must not be empty"),
    (
        lambda lines: lines[2].update(segments=[{"text": "a", "role": "tool"}]),
        "{path}:3: segment 0: the role is `tool`; it must be one of user",
    ),
    (
        lambda lines: lines[2].update(segments=[{"text": "a"}, {"id": 1, "num_tokens": 1}]),
        "{path}:3: a text cannot be combined with other segments",
    ),
    (
        lambda lines: lines[3].update(segments=[{"answer_of": 1}]),
        "{path}:4: segment 0: `answer_of` is 1, which is not an earlier turn of this ses",
    ),
    (lambda lines: lines[3].update(segments=[{"answer_of": 2}]), "{path}:4: segment 0: `answer_of` is 2"),
    (lambda lines: lines[2].update(output_tokens=0), "{path}:3: `output_tokens` is 0"),
    (
        lambda lines: lines[2].update(cancel_after_tokens=8),
        "{path}:3: `cancel_after_tokens` is 8; it must be from 1 to one less than `output_tokens` (8)",
    ),
    (
        lambda lines: lines[2].update(slo_class="chat"),
        "{path}:3: `slo_class` is `chat`; the header's `slos` has only `default`",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), BROKEN, ids=[message.removeprefix("{path}:")[:50] for _, message in BROKEN]
)
def test_invalid_line_is_named(tmp_path: Path, change: Change, message: str) -> None:
    lines = [json.loads(line) for line in plan_lines(chat_plan())]
    change(lines)
    path = tmp_path / "plan.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BadPlan) as caught:
        read_plan(path)
    assert str(caught.value).startswith(message.format(path=path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{path}: not a plan; the file is empty"),
        (b"\n", "{path}: not a plan; the file is empty"),
        (b"[1]\n", "{path}:1: [1] is not a JSON object"),
        (b'{"format": 1\n', "{path}:1: not JSON: Expecting ',' delimiter"),
        (b'{"format": NaN}\n', "{path}:1: not JSON: NaN is not a JSON number"),
        (b'{"a": "\xff"}\n', "{path}:1: not UTF-8 text (invalid start byte at byte 8 of the line)"),
        (b"[" * 100_000, "{path}:1: not JSON: "),
        (b"9" * 5000, "{path}:1: not JSON: "),
        (b"\x1f\x8b\x08broken gzip", "{path}: "),
        (gzip.compress(b"\n".join(plan_lines(chat_plan())))[:-20], "{path}: the gzip file is cut short"),
    ],
)
def test_damaged_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "plan"
    path.write_bytes(content)
    with pytest.raises(BadPlan) as caught:
        read_plan(path)
    assert str(caught.value).startswith(message.format(path=path))


@pytest.mark.parametrize("read", [read_plan, plan_hash])
def test_unreadable_files_are_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(BadPlan, match=r"nothing\.jsonl: no such file"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(BadPlan, match="cannot be read"):
        read(tmp_path)


def test_empty_line_is_named(tmp_path: Path) -> None:
    lines = list(plan_lines(chat_plan()))
    (tmp_path / "p").write_bytes(lines[0] + lines[1] + b"\n" + lines[2] + lines[3])
    with pytest.raises(BadPlan, match="p:3: an empty line"):
        read_plan(tmp_path / "p")


def test_invalid_plan_is_not_written(tmp_path: Path) -> None:
    wrong = replace(chat_plan(), requests=chat_plan().requests[1:])
    with pytest.raises(BadPlan, match="request 0: `index` is 1"):
        write_plan(wrong, tmp_path / "plan.jsonl")
    with pytest.raises(BadPlan, match="the plan has no requests"):
        check_plan(plan())
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    write_plan(chat_plan(), path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_plan(chat_plan(made_by={"x": float("nan")}), path)
    assert read_plan(path) == chat_plan()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.jsonl"]
    with pytest.raises(BadPlan, match="cannot be written: No such file or directory"):
        write_plan(chat_plan(), tmp_path / "no" / "plan.jsonl")


def test_prompt_lengths_are_counted() -> None:
    counted: Plan = plan(
        request(0, (0, 40), [1, 2, 3], session="s", output=10),
        request(1, "words", session="t"),
        request(2, (0, 40), 0, session="s", turn=1, after=0),
    )
    assert [counted.num_prompt_tokens(r) for r in counted.requests] == [43, None, 50]


def test_vocabulary_size_does_not_count_excluded_tokens() -> None:
    assert Vocabulary(low=10, high=20, excluded=(11, 12)).size == 8
