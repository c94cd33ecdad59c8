"""Records are read back as written, however the run ended; errors name the file and the line."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.loadgen_errors import BadRecords
from loadgen.measure.records import Record
from loadgen.measure.records_file import (
    RecordWriter,
    from_json,
    part_of,
    read_records,
    read_result,
    read_run,
    to_json,
    write_run,
)
from loadgen.send.run.run_plan import merge
from tests.loadgen_builders import record, refused, run


def written(path: Path, *records: Record) -> Path:
    with RecordWriter(path) as writer:
        for one in records:
            writer.write(one)
    return path


def test_record_is_unchanged_after_round_trip(tmp_path: Path) -> None:
    answer = record(
        1, tokens=(1.5, (1.6, 3)), token_ids=(4, 5, 6, 7), tenant="acme", timeline={"legs": [{"worker_id": "w0"}]}
    )
    path = written(tmp_path / "records.jsonl", refused(2, retry_after_s=0.5), answer)
    assert read_records(path) == ((answer, refused(2, retry_after_s=0.5)), ())


@settings(deadline=None)
@given(
    st.builds(
        Record,
        index=st.integers(0, 1 << 40),
        intended_s=st.integers(0, 10**10).map(lambda us: round(us / 1e6, 6)),
        ended_s=st.integers(0, 10**10).map(lambda us: round(us / 1e6, 6)),
        planned_prompt_tokens=st.none() | st.integers(0),
        planned_output_tokens=st.integers(0),
        error=st.text().filter(lambda text: text.isprintable()),
        tenant=st.text(),
        status=st.none() | st.integers(0, 999),
        is_complete=st.booleans(),
    )
)
def test_arbitrary_record_is_unchanged_after_round_trip(seen: Record) -> None:
    assert from_json(json.loads(json.dumps(to_json(seen)))) == seen


def test_records_are_written_immediately(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records.jsonl")
    writer.write(record())
    assert read_records(tmp_path / "records.jsonl")[0] == (record(),)
    writer.close()


def test_incomplete_last_line_is_dropped_with_a_note(tmp_path: Path) -> None:
    path = written(tmp_path / "records.jsonl", record(0), record(1))
    path.write_bytes(path.read_bytes()[:-30])
    records, notes = read_records(path)
    assert records == (record(0),)
    assert "line 2" in notes[0]
    assert "incomplete" in notes[0]


def test_last_line_without_line_end_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "records.jsonl", record(0))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_records(path) == ((record(0),), ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ("[]", "line 2: not a JSON object"),
        ('{"index": 1}', "line 2: `intended_s` is missing"),
        (json.dumps(to_json(record(1)) | {"intendedd_s": 1}), "line 2: `intendedd_s` is not a field of a record"),
        (json.dumps(to_json(record(1)) | {"ended_s": math.nan}), "line 2: `ended_s` is nan, not a time"),
        (json.dumps(to_json(record(1)) | {"status": "200"}), "line 2: `status` is '200', not an integer"),
        (
            json.dumps(to_json(record(1)) | {"arrivals": [[2.0, 1], [1.0, 1]]}),
            "line 2: `arrivals` has decreasing times",
        ),
        (json.dumps(to_json(record(1)) | {"arrivals": [[2.0, -1]]}), "line 2: `arrivals` must not be negative"),
        (json.dumps(to_json(record(0))), "line 2: request 0 is already in line 1"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "records.jsonl", record(0))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadRecords) as raised:
        read_records(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path / "records.jsonl")
    with pytest.raises(BadRecords, match="exists"):
        RecordWriter(path)


def test_timeline_that_is_not_json_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "records.jsonl", record(timeline={"placed_s": math.nan}, error="\udc80 garbage"))
    (seen,), _ = read_records(path)
    assert seen.timeline is None
    assert seen.error == "? garbage"


def test_result_directory_is_unchanged_after_round_trip(tmp_path: Path) -> None:
    write_run(tmp_path, run(duration_s=0.0))
    write_run(tmp_path, run(invalid=("late",), flags={"label": "one worker"}))
    written(tmp_path / "records.jsonl", record())
    result = read_result(tmp_path)
    assert result.run == run(invalid=("late",), flags={"label": "one worker"})
    assert result.records == (record(),)
    assert result.name == "one worker"
    assert result.plan_path is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.jsonl", "run.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "Expecting"),
        ("{}", "format None is not supported; this loadgen reads 1"),
        ('{"loadgen_result": 1, "plan_hash": ""}', "missing"),
        ('{"loadgen_result": 1, "colour": ""}', "unknown field 'colour'"),
    ],
)
def test_invalid_run_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(BadRecords, match=message) as raised:
        read_run(tmp_path / "run.json")
    assert "run.json" in str(raised.value)


def test_killed_run_is_read_from_the_files_of_its_processes(tmp_path: Path) -> None:
    write_run(tmp_path, run(processes=11))
    parts = [written(tmp_path / f"records.{part}.jsonl", record(20 - part)) for part in range(11)]
    written(tmp_path / ".records.jsonl", record(0))  # killed during the merge
    result = read_result(tmp_path)
    assert result.records == tuple(record(index) for index in range(10, 21))
    (note,) = result.notes
    assert note.startswith(
        "records.jsonl is missing: the records were read from records.0.jsonl, records.1.jsonl, records.2.jsonl, "
    )
    for part in (2, 10):
        parts[part].write_bytes(parts[part].read_bytes()[:-30])
    killed = read_result(tmp_path)
    assert [seen.index for seen in killed.records] == [11, 12, 13, 14, 15, 16, 17, 19, 20]
    assert [note.split(":")[0] for note in killed.notes[1:]] == ["records.2.jsonl", "records.10.jsonl"]
    written(tmp_path / "records.jsonl", record(7))
    assert (read_result(tmp_path).records, read_result(tmp_path).notes) == ((record(7),), ())


def test_request_in_two_files_is_an_error(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"records.{part}.jsonl", record(part), record(5)) for part in range(2)]
    with pytest.raises(
        BadRecords, match=r"records\.1\.jsonl: line 2: request 5 is already in line 2 of records\.0\.jsonl"
    ):
        read_records(*paths)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRecords, match="no such directory"):
        read_result(tmp_path / "nowhere")


def test_merge_leaves_one_file_and_notes_incomplete_lines(tmp_path: Path) -> None:
    parts = [written(part_of(tmp_path, part), record(2 * part), record(2 * part + 1)) for part in range(2)]
    parts[1].write_bytes(parts[1].read_bytes()[:-30])
    (note,) = merge(tmp_path, parts)
    assert note.startswith("records.1.jsonl: the last line 2 is incomplete")
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]
    assert [seen.index for seen in read_records(tmp_path / "records.jsonl")[0]] == [0, 1, 2]
    write_run(tmp_path, run(notes=(note,)))
    assert read_result(tmp_path).notes == (note,), "a later reader gets the note too"
