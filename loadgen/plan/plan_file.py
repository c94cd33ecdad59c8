"""Reads and writes plan files: canonical JSON lines, so that equal plans have equal bytes and one hash.

    line 1    {"format": 1, "ignore_eos": …, "made_by": {…}, "name": …, "num_requests": N, "seed": …,
               "slos": {class: {"ttft_s": …}}, "vocabulary": {"excluded": […], "high": …, "low": …}}
    line 2 …  {"at_s": 0.25, "index": 0, "output_tokens": 64, "segments": [{"id": 0, "num_tokens": 512}]}
              the fields of `PlannedRequest`

Canonical means: sorted keys, no spaces, ASCII, a line feed after each line, numbers as Python writes them,
and no fields with default values. Other files, for example handwritten ones, can be read as well; their hash
is that of their own bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import FORMAT, AnswerOf, Exact, Generated, Plan, PlannedRequest, Segment, Text, Vocabulary
from loadgen.plan.plan_check import PlanChecker, check_plan
from loadgen.slo_target import BadSlo, SloTarget
from loadgen.user_files import numbered_lines, sha256_of

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
_HEADER_KEYS = {"format", "ignore_eos", "made_by", "name", "num_requests", "seed", "slos", "vocabulary"}
_DEFAULTS = {field.name: field.default for field in fields(PlannedRequest) if field.default is not MISSING}
_REQUEST_KEYS = {field.name for field in fields(PlannedRequest)}
_INTEGERS = ("index", "output_tokens", "turn", "priority")
_INTEGERS_OR_NULL = ("after", "cancel_after_tokens")
_TEXTS = ("session", "tenant", "slo_class")


def write_plan(plan: Plan, path: str | Path) -> str:
    """Write a plan atomically, gzipped if `path` ends in `.gz`, and return its hash.

    Raises BadPlan if the plan is invalid or the file cannot be written.
    """
    check_plan(plan)
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.unfinished")
    digest = hashlib.sha256()
    try:
        with open(unfinished, "wb") as raw:
            # No time and no name in the gzip header, so that equal plans are equal files.
            out = (
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=4)
                if path.suffix == ".gz"
                else raw
            )
            for line in plan_lines(plan):
                digest.update(line)
                out.write(line)
            if out is not raw:
                out.close()
        os.replace(unfinished, path)
    except OSError as error:
        raise BadPlan(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return digest.hexdigest()


def plan_lines(plan: Plan) -> Iterator[bytes]:
    """Yield the canonical lines of a plan."""
    header = {
        "format": FORMAT,
        "ignore_eos": plan.ignore_eos,
        "made_by": dict(plan.made_by),
        "name": plan.name,
        "num_requests": len(plan.requests),
        "seed": plan.seed,
        "slos": {name: slo.to_json() for name, slo in plan.slos.items()},
        "vocabulary": {"excluded": plan.vocabulary.excluded, "high": plan.vocabulary.high, "low": plan.vocabulary.low},
    }
    yield f"{_encode(header)}\n".encode()
    for request in plan.requests:
        yield f"{_encode(request_to_json(request))}\n".encode()


def hash_of(plan: Plan) -> str:
    """Return the hash of the file that `write_plan` would write."""
    digest = hashlib.sha256()
    for line in plan_lines(plan):
        digest.update(line)
    return digest.hexdigest()


def plan_hash(path: str | Path) -> str:
    """Return the SHA-256 of the uncompressed bytes, in hex. Raises BadPlan if the file cannot be read."""
    return sha256_of(path)


def read_plan(path: str | Path) -> Plan:
    """Read and validate a plan. Raises BadPlan with the file name and the line number."""
    lines = numbered_lines(path)
    number, line = next(lines, (1, ""))
    if not line.strip():
        raise BadPlan(f"{path}: not a plan; the file is empty")
    try:
        num_requests, header = _header(_object(line))
        checker = PlanChecker(header["vocabulary"], header["slos"])
        requests: list[PlannedRequest] = []
        for number, line in lines:  # noqa: B007 - the error below names it
            if len(requests) == num_requests:
                raise BadPlan(f"too many lines; the header says {num_requests} requests")
            request = request_from_json(_object(line))
            checker.add(request)
            requests.append(request)
    except (BadPlan, BadSlo) as error:
        raise BadPlan(str(error) if str(error).startswith(f"{path}:") else f"{path}:{number}: {error}") from None
    if len(requests) < num_requests:
        raise BadPlan(f"{path}: the file ends after {len(requests)} of {num_requests} requests")
    return Plan(requests=tuple(requests), **header)


def request_to_json(request: PlannedRequest) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    data = {name: value for name, default in _DEFAULTS.items() if (value := getattr(request, name)) != default}
    data["index"] = request.index
    data["output_tokens"] = request.output_tokens
    data["segments"] = [_segment_to_json(segment) for segment in request.segments]
    for name in ("at_s", "think_s"):
        if name in data:
            data[name] = float(data[name])
    return data


def request_from_json(data: Mapping[str, Any]) -> PlannedRequest:
    """Return the request of a JSON object. Raises BadPlan for wrong keys and types; values are not checked
    here."""
    if not data.keys() <= _REQUEST_KEYS:
        raise BadPlan(
            f"`{min(data.keys() - _REQUEST_KEYS)}` is not a field of a request; known are "
            f"{', '.join(sorted(_REQUEST_KEYS))}"
        )
    values = dict(data)
    for name in ("index", "output_tokens", "segments"):
        if name not in values:
            raise BadPlan(f"`{name}` is missing")
    for name in _INTEGERS:
        if name in values:
            _expect(type(values[name]) is int, name, "an integer", values[name])
    for name in _INTEGERS_OR_NULL:
        if name in values:
            _expect(values[name] is None or type(values[name]) is int, name, "an integer or null", values[name])
    for name in _TEXTS:
        if name in values:
            _expect(isinstance(values[name], str), name, "a string", values[name])
    if (at_s := values.get("at_s")) is not None:
        _expect(type(at_s) in (int, float), "at_s", "a number or null", at_s)
        values["at_s"] = float(at_s)
    if "think_s" in values:
        _expect(type(values["think_s"]) in (int, float), "think_s", "a number", values["think_s"])
        values["think_s"] = float(values["think_s"])
    _expect(isinstance(values["segments"], list), "segments", "a list", values["segments"])
    values["segments"] = tuple(
        _segment_from_json(position, segment) for position, segment in enumerate(values["segments"])
    )
    return PlannedRequest(**values)


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    match segment:
        case Generated(segment_id=segment_id, num_tokens=num_tokens):
            return {"id": segment_id, "num_tokens": num_tokens}
        case Exact(token_ids=token_ids):
            return {"token_ids": token_ids}
        case Text(text=text, role=role):
            return {"text": text} if role == "user" else {"role": role, "text": text}
        case AnswerOf(index=index):
            return {"answer_of": index}


def _segment_from_json(position: int, data: Any) -> Segment:
    if isinstance(data, dict):  # the most frequent case first: a plan can have hundreds of thousands of segments
        if len(data) == 2:
            if type(segment_id := data.get("id")) is int and type(num_tokens := data.get("num_tokens")) is int:
                return Generated(segment_id=segment_id, num_tokens=num_tokens)
            if isinstance(text := data.get("text"), str) and isinstance(role := data.get("role"), str):
                return Text(text=text, role=role)
        elif len(data) == 1:
            ((kind, value),) = data.items()
            if kind == "answer_of" and type(value) is int:
                return AnswerOf(index=value)
            if kind == "text" and isinstance(value, str):
                return Text(text=value)
            if kind == "token_ids" and isinstance(value, list) and all(type(token_id) is int for token_id in value):
                return Exact(token_ids=tuple(value))
    raise BadPlan(
        f"segment {position} is {_shown(data)}; write one of "
        '{"id": 17, "num_tokens": 512}, {"token_ids": [12, 99]}, {"text": "…"}, {"answer_of": 4}'
    )


def _header(data: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return (number of requests, the other arguments of `Plan`). Raises BadPlan."""
    if "format" not in data:
        raise BadPlan("not a plan; the first line has no `format`")
    if data["format"] != FORMAT:
        raise BadPlan(f"the plan's format {_shown(data['format'])} is not supported; this loadgen reads {FORMAT}")
    if data.keys() != _HEADER_KEYS:
        unknown = sorted(data.keys() - _HEADER_KEYS)
        missing = sorted(_HEADER_KEYS - data.keys())
        raise BadPlan(
            f"the header lacks `{missing[0]}`"
            if missing
            else f"`{unknown[0]}` is not a field of the header; known are {', '.join(sorted(_HEADER_KEYS))}"
        )
    _expect(isinstance(data["name"], str), "name", "a string", data["name"])
    _expect(isinstance(data["ignore_eos"], bool), "ignore_eos", "true or false", data["ignore_eos"])
    _expect(type(data["seed"]) is int, "seed", "an integer", data["seed"])
    _expect(
        type(data["num_requests"]) is int and data["num_requests"] > 0,
        "num_requests",
        "an integer above 0",
        data["num_requests"],
    )
    _expect(isinstance(data["made_by"], dict), "made_by", "an object", data["made_by"])
    slos = data["slos"]
    is_slos = isinstance(slos, dict) and all(
        isinstance(slo, dict) and all(type(bound) in (int, float) and bound > 0 for bound in slo.values())
        for slo in slos.values()
    )
    _expect(is_slos, "slos", 'an object such as {"default": {"ttft_s": 0.5, "tpot_s": 0.05}}, bounds above 0', slos)
    vocabulary = data["vocabulary"]
    is_vocabulary = (
        isinstance(vocabulary, dict)
        and vocabulary.keys() <= {"low", "high", "excluded"}
        and type(vocabulary.get("low")) is int
        and type(vocabulary.get("high")) is int
        and isinstance(vocabulary.get("excluded", []), list)
        and all(type(token_id) is int for token_id in vocabulary.get("excluded", []))
    )
    _expect(is_vocabulary, "vocabulary", 'an object such as {"low": 3, "high": 4096, "excluded": []}', vocabulary)
    return data["num_requests"], {
        "name": data["name"],
        "seed": data["seed"],
        "ignore_eos": data["ignore_eos"],
        "made_by": data["made_by"],
        "slos": {name: SloTarget.from_json(slo) for name, slo in slos.items()},
        "vocabulary": Vocabulary(
            low=vocabulary["low"], high=vocabulary["high"], excluded=tuple(vocabulary.get("excluded", []))
        ),
    }


def _object(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadPlan(f"not JSON: {error}" if line.strip() else "an empty line") from None
    if not isinstance(data, dict):
        raise BadPlan(f"{_shown(data)} is not a JSON object")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _expect(is_right: bool, name: str, what: str, value: Any) -> None:
    if not is_right:
        raise BadPlan(f"`{name}` is {_shown(value)}; it must be {what}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
