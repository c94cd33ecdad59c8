"""Measures the latency of short requests at `baton gateway` with and without 300 slow clients.

python -m bench gateway_slow_clients [--repeats 15]

The gateway runs alone on one core, a stub cluster and all clients on the other cores. Each slow client sends
one byte per second, half of them within the HTTP head and half within the body. A client whose connection is
closed at the receive deadline connects again. One more client sends short requests one after the other.
Blocks of its requests with and without slow clients alternate.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import uvloop

from bench.scenarios.control.gateway import SHORT_WORDS, GatewayBench, baton_gateway
from bench.support.gateway_load import load, prompts, requests
from bench.systems.baton_cluster import machine, table
from bench.systems.gateway_process import Cores, System

NUM_SLOW, RECEIVE_DEADLINE_S = 300, 10.0
NUM_REQUESTS = 700
"""Requests per block. Seven of them lie above the 99th percentile."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
"""An incomplete HTTP head: the empty line at its end is missing."""
READY_S = 60.0
NICE = 10
"""Niceness of the slow clients' process. Real slow clients would not share cores with the timed one."""


async def slow_client(host: str, port: int, beginning: bytes, is_open: asyncio.Event) -> None:
    """Send `beginning`, then one byte per second. Connect again when the gateway closes the connection."""
    while True:
        with suppress(ConnectionResetError, BrokenPipeError):  # the gateway has stopped, so the benchmark is over
            reader, writer = await asyncio.open_connection(host, port)
            is_open.set()
            writer.write(beginning)
            while not reader.at_eof():
                try:
                    async with asyncio.timeout(1.0):
                        await reader.read(65536)
                except TimeoutError:
                    writer.write(b"x")
            writer.close()


async def slow_clients(host: str, port: int, beginnings: Sequence[bytes], all_open: Event) -> None:
    """Run one slow client per element of `beginnings`; set `all_open` once all of them are connected."""
    opens = [asyncio.Event() for _ in beginnings]
    clients = [slow_client(host, port, *each) for each in zip(beginnings, opens, strict=True)]
    running = asyncio.gather(*clients)
    for is_open in opens:
        await is_open.wait()
    all_open.set()
    await running


def run_slow_clients(host: str, port: int, beginnings: Sequence[bytes], all_open: Event) -> None:
    """Run `slow_clients` as the main function of a process."""
    os.nice(NICE)
    uvloop.run(slow_clients(host, port, beginnings, all_open))


@contextmanager
def slow_clients_connected(system: System) -> Iterator[None]:
    """Connect all slow clients, in a separate process, for the duration of the block."""
    host, port = system.address
    body = request(system, "x")[:-20]
    beginnings = [HEAD if number % 2 else body for number in range(NUM_SLOW)]
    context = multiprocessing.get_context("spawn")
    all_open = context.Event()
    process = context.Process(target=run_slow_clients, args=(host, port, beginnings, all_open), daemon=True)
    process.start()
    try:
        if not all_open.wait(READY_S):
            raise SystemExit(f"the gateway did not accept {NUM_SLOW} connections within {READY_S:g} s")
        yield
    finally:
        process.terminate()
        process.join()


def request(system: System, text: str) -> bytes:
    """Return one encoded HTTP request."""
    host, _ = system.address
    return requests(host, system.model, [text], max_tokens=1, stream=False)[0]


async def block(system: System, seed: int) -> list[float]:
    """Send one block of requests one after the other. Return their latencies in milliseconds."""
    host, port = system.address
    work = requests(host, system.model, prompts(seed, NUM_REQUESTS, SHORT_WORDS), max_tokens=1, stream=False)
    return [(answer.end_ns - answer.sent_ns) / 1e6 for answer in await load(host, port, work, 1)]


async def measure(system: System, repeats: int) -> list[tuple[list[float], list[float]]]:
    """Return the latencies (without, with slow clients) of each repeat.

    The order alternates between repeats.
    """
    await GatewayBench(system).warm_up()
    found = []
    for number in range(repeats):
        halves: dict[bool, list[float]] = {}
        for is_slow in (False, True) if number % 2 == 0 else (True, False):
            if is_slow:
                with slow_clients_connected(system):
                    halves[True] = await block(system, 2 * number)
            else:
                halves[False] = await block(system, 2 * number + 1)
        found.append((halves[False], halves[True]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of blocks (15)")
    args = parser.parse_args()
    cores = Cores.split()
    os.sched_setaffinity(0, cores.others)
    print(machine("grpcio", "uvicorn", "uvloop"))
    deadline = ("--receive-deadline-s", str(RECEIVE_DEADLINE_S))
    with (
        tempfile.TemporaryDirectory() as directory,
        baton_gateway(cores, Path(directory, "stamps"), *deadline) as system,
    ):
        found = uvloop.run(measure(system, args.repeats))
    rows = []
    for percentile in (50, 99):
        pairs = [
            (float(np.percentile(without, percentile)), float(np.percentile(with_slow, percentile)))
            for without, with_slow in found
        ]
        ratios = [with_slow / without for without, with_slow in pairs]
        medians = [f"{statistics.median(side):.2f}" for side in zip(*pairs, strict=True)]
        rows.append(
            [f"p{percentile}, ms", *medians, f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"]
        )
    print(table(["", "without", f"with {NUM_SLOW} slow clients", "ratio"], rows))


if __name__ == "__main__":
    main()
