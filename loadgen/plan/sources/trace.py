"""Replays recorded traces of Mooncake and Azure. (`loadgen.plan.sources.servegen` generates fitted arrivals.)

A trace has times and lengths; the content is generated. If it records which prompts share prefixes
(Mooncake's hash ids), that is reproduced exactly. Times are unchanged except for the user's scale factor.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from loadgen.loadgen_errors import BadPlan
from loadgen.plan import draws
from loadgen.plan.plan import Generated, PlannedRequest
from loadgen.user_files import numbered_lines

HASH_BLOCK_TOKENS = 512
"""Tokens per Mooncake hash id. The last id of a prompt may cover fewer."""

TICK_S = 3.0
"""Resolution of Mooncake's timestamps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a trace to replay, and its speed.

    - `start_s`, `duration_s`: in the trace's time, from its first row
    - `limit`: most requests
    - `time_scale`: factor on all times; 0.5 doubles the rate
    - `max_tokens`: rows whose prompt and response together are longer are left out
    """

    start_s: float = 0.0
    duration_s: float | None = None
    limit: int | None = None
    time_scale: float = 1.0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeRow:
    """One request of a trace. `hash_ids` has one id for each started block of 512 prompt tokens.

    An id identifies the content of its block and of all blocks before it.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureRow:
    """One request of a trace, at `ticks` of 100 ns."""

    ticks: int
    input_length: int
    output_length: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests of a part of a trace, with the number of rows left out.

    `num_too_long` rows exceeded `max_tokens`. `num_empty` rows have no prompt or response tokens.
    """

    requests: list[PlannedRequest]
    num_too_long: int
    num_empty: int


def read_mooncake(path: str | Path) -> list[MooncakeRow]:
    """Read a trace in Mooncake's format (FAST'25), possibly gzipped. Raises BadPlan with the line number.

    It is JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.
    """
    rows: list[MooncakeRow] = []
    for line_number, line in numbered_lines(path):
        try:
            row = _mooncake_row(line)
            if rows and row.timestamp_ms < rows[-1].timestamp_ms:
                raise BadPlan(
                    f"`timestamp` {row.timestamp_ms} is before {rows[-1].timestamp_ms} in the previous row; sort "
                    "the file by time"
                )
        except BadPlan as error:
            raise BadPlan(f"{path}:{line_number}: {error}") from None
        rows.append(row)
    if not rows:
        raise BadPlan(f"{path}: the trace is empty")
    return rows


def replay_mooncake(
    rows: list[MooncakeRow], cut: Cut | None = None, *, seed: int = 0, tick_s: float = TICK_S, shrink: int = 1
) -> Replay:
    """Return one request for each row, in their order.

    Equal hash ids give equal tokens, other ids differ from the first token on, and prompts have exactly
    `input_length` tokens.

    The rounding of timestamps is undone: the requests of one timestamp are spread over the following `tick_s`
    at uniform random times in ascending order, so rows keep their order. `tick_s=0` sends each tick's
    requests at once.

    `shrink` divides all lengths for small models. A full block then has `512 / shrink` tokens; partial blocks
    and responses are rounded up. Sharing stays the same, block for block.
    """
    cut = cut or Cut()
    if shrink < 1 or HASH_BLOCK_TOKENS % shrink:
        raise BadPlan(f"--shrink is {shrink}; it must be a divisor of {HASH_BLOCK_TOKENS}, such as 8 or 16")
    times_s = _spread([row.timestamp_ms for row in rows], tick_s, seed)
    requests: list[PlannedRequest] = []
    num_too_long = num_empty = 0
    block_tokens = HASH_BLOCK_TOKENS // shrink
    for row, at_s in zip(rows, _played(times_s, cut), strict=True):
        if at_s is None:
            continue
        if not row.input_length or not row.output_length:
            num_empty += 1
            continue
        num_full, rest = divmod(row.input_length, HASH_BLOCK_TOKENS)
        lengths = [block_tokens] * num_full + [-(-rest // shrink)] * (rest > 0)
        num_output = -(-row.output_length // shrink)
        if cut.max_tokens is not None and sum(lengths) + num_output > cut.max_tokens:
            num_too_long += 1
            continue
        segments = tuple(Generated(segment_id=id_, num_tokens=n) for id_, n in zip(row.hash_ids, lengths, strict=True))
        requests.append(PlannedRequest(index=len(requests), at_s=at_s, segments=segments, output_tokens=num_output))
        if len(requests) == cut.limit:
            break
    return _not_empty(Replay(requests, num_too_long, num_empty))


def read_azure(path: str | Path) -> list[AzureRow]:
    """Read a trace in Azure's format (Splitwise, ISCA'24; DynamoLLM), possibly gzipped.

    It is CSV with `TIMESTAMP` (up to 100 ns digits), `ContextTokens` and `GeneratedTokens`. Raises BadPlan
    with the line number.
    """
    rows: list[AzureRow] = []
    columns: list[int] = []
    for line_number, line in numbered_lines(path):
        cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        try:
            if line_number == 1:
                columns = [_column(cells, name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
                continue
            if not cells:
                raise BadPlan("an empty line")
            if len(cells) <= max(columns):
                raise BadPlan(f"{len(cells)} cells in `{line[:60]}`, but the header has more")
            time, context, generated = (cells[column] for column in columns)
            row = AzureRow(ticks=_ticks(time), input_length=_length(context), output_length=_length(generated))
            if rows and row.ticks < rows[-1].ticks:
                raise BadPlan(f"{time} is before the time in the previous row; sort the file by time")
        except BadPlan as error:
            raise BadPlan(f"{path}:{line_number}: {error}") from None
        rows.append(row)
    if not rows:
        raise BadPlan(f"{path}: the trace is empty")
    return rows


def replay_azure(rows: list[AzureRow], cut: Cut | None = None) -> Replay:
    """Return one request for each row, with its length and its time from the first row. Prompts share
    nothing."""
    cut = cut or Cut()
    times_s = np.array([row.ticks - rows[0].ticks for row in rows]) / 1e7
    requests: list[PlannedRequest] = []
    num_too_long = num_empty = 0
    for row, at_s in zip(rows, _played(times_s, cut), strict=True):
        if at_s is None:
            continue
        if not row.input_length or not row.output_length:
            num_empty += 1
            continue
        if cut.max_tokens is not None and row.input_length + row.output_length > cut.max_tokens:
            num_too_long += 1
            continue
        index = len(requests)
        prompt = (Generated(segment_id=index, num_tokens=row.input_length),)
        requests.append(PlannedRequest(index=index, at_s=at_s, segments=prompt, output_tokens=row.output_length))
        if len(requests) == cut.limit:
            break
    return _not_empty(Replay(requests, num_too_long, num_empty))


def _spread(timestamps_ms: list[int], tick_s: float, seed: int) -> draws.Floats:
    """Return seconds from the first timestamp, with the requests of a tick at sorted uniform times
    within it."""
    ticks, counts = np.unique(np.asarray(timestamps_ms), return_counts=True)
    part = draws.stream(seed, "arrivals").random(len(timestamps_ms))
    tick_of = np.repeat(np.arange(len(ticks)), counts)
    part = part[np.lexsort((part, tick_of))]
    times_s = (np.repeat(ticks, counts) - ticks[0]) / 1e3 + part * tick_s
    # A tick that begins a millisecond early overlaps the previous one; rows must keep their order.
    return np.maximum.accumulate(np.round(times_s, 6))


def _played(times_s: draws.Floats, cut: Cut) -> list[float | None]:
    """Return when each row is sent, or None if it is outside of the cut. Raises BadPlan."""
    if not (cut.time_scale > 0 and cut.start_s >= 0):
        raise BadPlan(
            f"time scale {cut.time_scale:g}, start {cut.start_s:g} s; the scale must be above 0 and the start not "
            "negative"
        )
    end_s = np.inf if cut.duration_s is None else cut.start_s + cut.duration_s
    inside = (times_s >= cut.start_s) & (times_s < end_s)
    played = np.round((times_s - cut.start_s) * cut.time_scale, 6)
    return [at_s if is_inside else None for at_s, is_inside in zip(played.tolist(), inside.tolist(), strict=True)]


def _not_empty(replay: Replay) -> Replay:
    if not replay.requests:
        left_out = f"{replay.num_too_long} are too long, {replay.num_empty} are empty"
        raise BadPlan(f"no request of the trace is left: {left_out}, all others are outside of the selected time")
    return replay


def _mooncake_row(line: str) -> MooncakeRow:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadPlan(f"not JSON: {error}" if line.strip() else "an empty line") from None
    if not isinstance(data, dict):
        raise BadPlan("not a JSON object")
    for name in ("timestamp", "input_length", "output_length"):
        value = data.get(name)
        if type(value) is float and value.is_integer():
            data[name] = value = int(value)
        if type(value) is not int or value < 0:
            raise BadPlan(f"`{name}` is {value!r}; it must be an integer of 0 or more")
    ids = data.get("hash_ids")
    if not isinstance(ids, list) or not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise BadPlan("`hash_ids` must be a list of integers of 0 or more")
    num_blocks = -(-data["input_length"] // HASH_BLOCK_TOKENS)
    if len(ids) != num_blocks:
        raise BadPlan(
            f"{len(ids)} hash ids for {data['input_length']} tokens; one for each {HASH_BLOCK_TOKENS} tokens "
            f"would be {num_blocks}"
        )
    return MooncakeRow(
        timestamp_ms=data["timestamp"],
        input_length=data["input_length"],
        output_length=data["output_length"],
        hash_ids=tuple(ids),
    )


_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")
_EPOCH = datetime(2000, 1, 1)


def _ticks(text: str) -> int:
    """Return 100 ns ticks since 2000, exactly. `datetime` has only microseconds."""
    match = _TIME.fullmatch(text)
    try:
        seconds = datetime.fromisoformat(match[1]) if match else None
    except ValueError:
        seconds = None
    if match is None or seconds is None:
        raise BadPlan(f"`{text}` is not a time such as 2023-11-16 18:17:03.9799600")
    since = seconds - _EPOCH
    return (since.days * 86400 + since.seconds) * 10_000_000 + int((match[2] or "").ljust(9, "0")[:7])


def _length(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise BadPlan(f"`{text}` is not a number of tokens")
    return int(text)


def _column(header: list[str], name: str) -> int:
    if name not in header:
        raise BadPlan(f"no column `{name}`; the first line must name TIMESTAMP, ContextTokens and GeneratedTokens")
    return header.index(name)
