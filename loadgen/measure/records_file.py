"""Reads and writes a result directory: `records.jsonl`, one line per request, and `run.json`.

During a run of several processes, each writes its own file, `records.0.jsonl` and so on. They remain if the
run is killed.

A line has the fields of `Record` that differ from their defaults; `arrivals` is a list of [seconds, tokens].
Times have microsecond resolution. A killed run loses at most the line that was being written: the reader
drops an incomplete last line with a note. Any other invalid line is an error with its line number.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from loadgen.loadgen_errors import BadRecords, LoadgenError
from loadgen.measure.records import Arrival, Record, RunInfo
from loadgen.slo_target import SloTarget

RECORDS = "records.jsonl"
RUN = "run.json"
PLANS = ("plan.jsonl", "plan.jsonl.gz")
FORMAT = 1
"""Version of the result directory. Raised when an old reader would misread a new result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run as read from its directory. Records are in the order of `index`; `notes` includes the reader's
    remarks."""

    path: Path
    run: RunInfo
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name for reports: the run's label or the directory's name."""
        return str(self.run.flags.get("label") or "") or self.path.resolve().name

    @property
    def plan_path(self) -> Path | None:
        """Path of the workload plan in the result directory, or None if the run stored none."""
        return next((path for name in PLANS if (path := self.path / name).is_file()), None)


class RecordWriter:
    """Writes records to a new file, each by one unbuffered write, so that they survive a Ctrl-C or kill."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises BadRecords if it exists, because results are never overwritten."""
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise BadRecords(f"{path} exists; results are never overwritten, choose another directory") from None
        except OSError as error:
            raise BadRecords(f"{path}: {error.strerror}") from error
        self.count = 0

    def write(self, record: Record) -> None:
        """Append one record."""
        data = to_json(record)
        try:
            line = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        except (
            ValueError,
            TypeError,
        ):  # only the server's timeline can contain values that are not JSON; drop it and keep the rest
            data.pop("timeline", None)
            line = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode("utf-8", "replace") + b"\n")
        self.count += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_run(directory: Path, run: RunInfo) -> None:
    """Write `run.json` atomically. It may be rewritten during a run."""
    data = {"loadgen_result": FORMAT, **asdict(run), "slos": {name: slo.to_json() for name, slo in run.slos.items()}}
    with tempfile.NamedTemporaryFile(
        "w", dir=directory, prefix=".run-", suffix=".json", delete=False, encoding="utf-8"
    ) as file:
        json.dump(data, file, indent=1, ensure_ascii=False, default=str)
        file.write("\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, directory / RUN)


def read_result(directory: Path) -> Result:
    """Read a result directory. Raises BadRecords with the file and the line."""
    if not directory.is_dir():
        raise BadRecords(f"{directory}: no such directory; give a result of `loadgen run`")
    run = read_run(directory / RUN)
    files = _files(directory)
    records, notes = read_records(*files)
    if directory / RECORDS not in files:
        notes = (f"{RECORDS} is missing: the records were read from {', '.join(file.name for file in files)}", *notes)
    return Result(path=directory, run=run, records=records, notes=(*run.notes, *notes))


def part_of(directory: Path, part: int) -> Path:
    """Return the record file of one of several processes."""
    return directory / f"records.{part}.jsonl"


def _files(directory: Path) -> list[Path]:
    """Return the record files: `records.jsonl`, or those of the processes if it does not exist."""
    parts = {
        int(path.suffixes[0][1:]): path
        for path in directory.glob("records.*.jsonl")
        if path.suffixes[0][1:].isdecimal()
    }
    merged = directory / RECORDS
    return [parts[part] for part in sorted(parts)] if parts and not merged.exists() else [merged]


def read_run(path: Path) -> RunInfo:
    """Read `run.json`. Raises BadRecords."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRecords(f"{path}: no such file; is {path.parent} a result of `loadgen run`?") from None
    except (ValueError, OSError) as error:
        raise BadRecords(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise BadRecords(f"{path}: not a JSON object")
    version = data.pop("loadgen_result", None)
    if version != FORMAT:
        raise BadRecords(f"{path}: format {version!r} is not supported; this loadgen reads {FORMAT}")
    try:
        slos = {str(name): SloTarget.from_json(slo) for name, slo in dict(data.pop("slos", {})).items()}
        return RunInfo(
            **{**data, "slos": slos, "invalid": tuple(data.get("invalid", ())), "notes": tuple(data.get("notes", ()))}
        )
    except (TypeError, ValueError, LoadgenError) as error:
        raise BadRecords(f"{path}: {_user_message(error)}") from error


def read_records(*paths: Path) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """Return the records of all files by index, and notes.

    Raises BadRecords with the line number, also for an index that occurs twice.
    """
    notes: list[str] = []
    seen: dict[int, str] = {}
    records: list[Record] = []
    for file, (number, line, is_torn) in ((path, line) for path in paths for line in _lines(path)):
        try:
            record = from_json(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if is_torn:
                notes.append(f"{file.name}: the last line {number} is incomplete and was dropped ({len(line)} bytes)")
                continue
            raise BadRecords(f"{file}: line {number}: {_user_message(error)}") from error
        if record.index in seen:
            raise BadRecords(f"{file}: line {number}: request {record.index} is already in {seen[record.index]}")
        seen[record.index] = f"line {number} of {file.name}"
        records.append(record)
    records.sort(key=lambda record: record.index)
    return tuple(records), tuple(notes)


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line number, line without its end, True if the end is missing) of non-empty lines."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n"), not line.endswith(b"\n")
    except FileNotFoundError:
        raise BadRecords(f"{path}: no such file; is {path.parent} a result of `loadgen run`?") from None
    except OSError as error:
        raise BadRecords(f"{path}: {error.strerror}") from error


_TIMES = ("intended_s", "ended_s", "sent_s", "retry_after_s")
_FIELDS = {field.name: field for field in fields(Record)}
_REQUIRED = tuple(
    field.name for field in fields(Record) if field.default is MISSING and field.default_factory is MISSING
)


def to_json(record: Record) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    data: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        value = getattr(record, name)
        if name in _REQUIRED or value != field.default:
            data[name] = value
    for name in _TIMES:
        if data.get(name) is not None:
            data[name] = round(data[name], 6)
    if record.arrivals:
        data["arrivals"] = [[round(arrival.at_s, 6), arrival.num_tokens] for arrival in record.arrivals]
    return data


def from_json(data: Any) -> Record:
    """Return the record of a JSON object. Raises ValueError with a message for the user."""
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    unknown = sorted(set(data) - set(_FIELDS))
    if unknown:
        raise ValueError(f"`{unknown[0]}` is not a field of a record")
    missing = [name for name in _REQUIRED if name not in data]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing")
    return Record(**{name: _READERS[name](name, value) for name, value in data.items()})


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"`{name}` is {value!r:.40}, not an integer")
    return value


def _count(name: str, value: Any) -> int:
    if _integer(name, value) < 0:
        raise ValueError(f"`{name}` must not be negative")
    return value


def _seconds(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"`{name}` is {value!r:.40}, not a time")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {value!r:.40}, not a string")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` is {value!r:.40}, not true or false")
    return value


def _arrivals(name: str, value: Any) -> tuple[Arrival, ...]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError(f"`{name}` is not a list of [seconds, tokens]")
    arrivals = tuple(
        Arrival(at_s=_seconds(name, at_s), num_tokens=_count(name, num_tokens)) for at_s, num_tokens in value
    )
    if any(later.at_s < earlier.at_s for earlier, later in pairwise(arrivals)):
        raise ValueError(f"`{name}` has decreasing times")
    return arrivals


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is not a list of token ids")
    return tuple(_count(name, token_id) for token_id in value)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` is not a JSON object")
    return value


def _or_none(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else read(name, value)


_BY_TYPE: dict[str, Callable[[str, Any], Any]] = {
    "int": _integer,
    "int | None": _or_none(_count),
    "float": _seconds,
    "float | None": _or_none(_seconds),
    "str": _text,
    "bool": _flag,
    "tuple[Arrival, ...]": _arrivals,
    "tuple[int, ...]": _ids,
    "Mapping[str, Any] | None": _or_none(_object),
}
_READERS = {name: _BY_TYPE[str(field.type)] for name, field in _FIELDS.items()}


def _user_message(error: BaseException) -> str:
    """Return the message of a dataclass's TypeError without Python terms."""
    return (
        str(error)
        .replace("RunInfo.__init__() got an unexpected keyword argument", "unknown field")
        .replace("RunInfo.__init__() ", "")
    )
