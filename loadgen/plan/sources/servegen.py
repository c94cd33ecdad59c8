"""Arrivals fitted to production load: the client windows of ServeGen (Alibaba).

A workload is the sum of its clients, each with its own burstiness. For every ten-minute window of every
client the file has the mean request rate and a distribution fitted to the gaps between requests, with shape
and scale.

Here a window is a renewal process in equilibrium (`loadgen.plan.arrivals`) with that family and shape, and
with a mean gap of one over the window's rate. The fitted scale is not used: it comes from a sample of gaps
and in sparse windows implies another rate than the one counted. ServeGen's own generator stretches each
window until the number of requests is exact; this one does not.

The file has no lengths; they are arguments. Each window of a client has its own random stream, so selecting
other clients or times leaves the rest unchanged.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadgen import text_forms
from loadgen.loadgen_errors import BadPlan, EmptyPlan
from loadgen.plan import draws
from loadgen.plan.arrivals import arrivals, gamma_gaps, steady, weibull_gaps
from loadgen.plan.lengths import Distribution, draw_lengths
from loadgen.plan.plan import Generated, PlannedRequest
from loadgen.user_files import numbered_lines

WINDOW_S = 600.0
COLUMNS = ("workload", "client", "window_start_s", "rate_rps", "cv", "pattern", "arg1", "arg2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientWindow:
    """Ten minutes of one client. `family` is gamma or weibull."""

    workload: str
    client: int
    start_s: float
    rate_rps: float
    family: str
    shape: float


def read_servegen(path: str | Path) -> list[ClientWindow]:
    """Read a CSV file, possibly gzipped, with the columns of `COLUMNS`. Raises BadPlan with the line number.

    Windows without requests or without a fit are left out.
    """
    windows = []
    columns: list[int] = []
    for line_number, line in numbered_lines(path):
        cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        where = f"{path}:{line_number}"
        if line_number == 1:
            missing = [name for name in COLUMNS if name not in cells]
            if missing:
                raise BadPlan(f"{where}: no column `{missing[0]}`; the first line must name {', '.join(COLUMNS)}")
            columns = [cells.index(name) for name in COLUMNS]
            continue
        if len(cells) <= max(columns):
            raise BadPlan(f"{where}: {len(cells)} cells in `{line[:60]}`, but the header has more")
        workload, client, start, rate, _, family, shape, _ = (cells[column] for column in columns)
        if not family or not rate or float_of(rate, where) == 0:
            continue
        if family.lower() not in ("gamma", "weibull"):
            raise BadPlan(f"{where}: the pattern is `{family}`; it must be Gamma or Weibull")
        if not client.isdigit():
            raise BadPlan(f"{where}: the client is `{client}`; it must be an integer")
        if float_of(shape, where) <= 0:
            raise BadPlan(f"{where}: the shape (`arg1`) is {shape}; it must be above 0")
        windows.append(
            ClientWindow(
                workload=workload,
                client=int(client),
                start_s=float_of(start, where),
                rate_rps=float_of(rate, where),
                family=family.lower(),
                shape=float_of(shape, where),
            )
        )
    if not windows:
        raise BadPlan(f"{path}: the file has no windows")
    return windows


def choose_windows(
    windows: Sequence[ClientWindow],
    *,
    workload: str | None = None,
    clients: Collection[int] | None = None,
    top: int | None = None,
    start_s: float = 0.0,
    duration_s: float | None = None,
) -> list[ClientWindow]:
    """Return the windows of one workload, of the given clients, that overlap the given time.

    `top` keeps the clients with the most requests in that time. Raises BadPlan if no window is left, or if
    there are several workloads and `workload` is None.
    """
    names = sorted({window.workload for window in windows})
    if workload is None and len(names) > 1:
        raise BadPlan(f"the file has several workloads; give --workload, one of {', '.join(names)}")
    if workload is not None and workload not in names:
        raise BadPlan(f"no workload `{workload}`; the file has {', '.join(names)}")
    end_s = np.inf if duration_s is None else start_s + duration_s
    of_time = [
        window
        for window in windows
        if window.workload == (workload or names[0]) and window.start_s < end_s and window.start_s + WINDOW_S > start_s
    ]
    known = {window.client for window in windows if window.workload == (workload or names[0])}
    if clients is not None and (unknown := sorted(set(clients) - known)):
        raise BadPlan(
            f"no client {unknown[0]} in `{workload or names[0]}`; it has {len(known)} clients, {min(known)} to "
            f"{max(known)}"
        )
    chosen = [window for window in of_time if clients is None or window.client in clients]
    if top is not None:
        volume: dict[int, float] = {}
        for window in chosen:
            volume[window.client] = volume.get(window.client, 0.0) + window.rate_rps
        best = set(sorted(volume, key=lambda client: (-volume[client], client))[:top])
        chosen = [window for window in chosen if window.client in best]
    if not chosen:
        raise BadPlan("no selected client sends a request in the selected time; select other clients or a longer time")
    return chosen


def replay_servegen(
    windows: Sequence[ClientWindow],
    *,
    inputs: Distribution,
    outputs: Distribution,
    seed: int,
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
    limit: int | None = None,
) -> list[PlannedRequest]:
    """Return the clients' requests together, as tenants `client-N`.

    `start_s` and `duration_s` are in the file's time. `rate_scale` multiplies every rate and leaves the shape
    of the gaps. Prompts share nothing.
    """
    if not rate_scale > 0:
        raise BadPlan(f"`rate_scale` is {rate_scale:g}; it must be above 0")
    end_s = np.inf if duration_s is None else start_s + duration_s
    times, clients = [], []
    for window in windows:
        gaps = gamma_gaps(window.shape) if window.family == "gamma" else weibull_gaps(window.shape)
        rng = draws.stream(seed, f"arrivals of {window.workload}, {window.client}, {window.start_s:g}")
        found = window.start_s + arrivals(
            rng, gaps, steady(window.rate_rps * rate_scale), until_s=min(WINDOW_S, end_s - window.start_s)
        )
        found = found[(found >= start_s) & (found < end_s)]
        times.append(found - start_s)
        clients.append(np.full(len(found), window.client))
    times_s = np.round(np.concatenate(times), 6)
    order = np.lexsort((np.concatenate(clients), times_s))[:limit]
    if not len(order):
        raise EmptyPlan("no request arrives; select more clients, a longer time or a higher --rate-scale")
    num_inputs = draw_lengths(inputs, draws.stream(seed, "input"), len(order)).tolist()
    num_outputs = draw_lengths(outputs, draws.stream(seed, "output"), len(order)).tolist()
    client_of = np.concatenate(clients)[order].tolist()
    return [
        PlannedRequest(
            index=index,
            at_s=at_s,
            segments=(Generated(segment_id=index, num_tokens=num_inputs[index]),),
            output_tokens=num_outputs[index],
            tenant=f"client-{client_of[index]}",
        )
        for index, at_s in enumerate(times_s[order].tolist())
    ]


def float_of(text: str, where: str) -> float:
    """Return a number, or raise BadPlan with the position `where`."""
    try:
        return text_forms.number(text)
    except BadPlan as error:
        raise BadPlan(f"{where}: {error}") from None
