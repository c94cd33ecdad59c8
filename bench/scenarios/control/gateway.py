"""What does the front door cost? A real `baton gateway` on one core; a stub cluster and the clients on the
others.

python -m bench gateway [--repeats 5] [--peers DIR] [--json]

Not streamed: 1,000 random words and one token, 32 in flight; `made up`: the same with words that nobody has
ever seen, so that no memory of words helps; `added ms`: one in flight, less what the stub took. Streamed: 64
answers to short prompts, a token a step each, more than any gateway carries; `first event ms`: from the
moment when the worker sends a first token to the client's first event, one in flight on a kept-alive
connection. `a core`: by the CPU time that the gateway took; its wall clock also waits for the clients and for
whatever else the machine does. Medians; all take turns, so that a machine drifts for all.

With --peers, sglang-router and Dynamo's frontend do the same work beside it, each before a stub of its own
kind, from virtual environments in DIR, which are made where they are missing.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

from bench.support.gateway_load import TimedAnswer, load, made_up, prompts, requests
from bench.systems import gateway_peers
from bench.systems.baton_cluster import machine, table
from bench.systems.gateway_process import Cores, System, cpu_s, started

PROMPT_WORDS, IN_FLIGHT = 1000, 32
SHORT_WORDS, STREAMS, STREAM_TOKENS, STEP_S = 8, 64, 300, 0.0015
NUM_WHOLE, NUM_MADE_UP, NUM_ALONE, NUM_FIRSTS = 1000, 300, 100, 100
READY_S = 30.0


@contextmanager
def baton(cores: Cores, stamps: Path, *more: str) -> Iterator[System]:
    """The gateway under test; `more`: flags of its own."""
    with started([sys.executable, "-m", "bench.systems.gateway_stub", str(STEP_S), str(stamps)], cores.others) as (
        stub_pid,
        scheduler,
    ):
        flags = ["--schedulers", scheduler, "--http-port", "0", "--grpc-port", "0", "--log-level", "error", *more]
        with started([str(Path(sys.executable).parent / "baton"), "gateway", *flags], cores.gateway) as (pid, url):
            yield System(name="baton", url=url, model="demo", pid=pid, stub_pid=stub_pid, stamps=stamps)


class GatewayBench:
    """One system's measurements, a value a repeat under each name."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.figures: dict[str, list[float]] = {}
        self._seed = 0

    async def warm_up(self) -> None:
        """Until it answers, and then a little more."""
        await self._until_ready()
        await self._ask(self._prompts(NUM_WHOLE), max_tokens=1, in_flight=IN_FLIGHT)
        await self._ask(self._prompts(STREAMS, SHORT_WORDS), max_tokens=20, in_flight=STREAMS, stream=True)

    async def whole(self) -> None:
        await self._timed("requests", NUM_WHOLE, self._ask(self._prompts(NUM_WHOLE), max_tokens=1, in_flight=IN_FLIGHT))

    async def made_up(self) -> None:
        texts = made_up(self._next_seed(), NUM_MADE_UP, PROMPT_WORDS)
        await self._timed("made_up", NUM_MADE_UP, self._ask(texts, max_tokens=1, in_flight=IN_FLIGHT))

    async def alone(self) -> None:
        answers = await self._ask(self._prompts(NUM_ALONE), max_tokens=1, in_flight=1)
        stub_ns = [sent_ns - arrived_ns for arrived_ns, sent_ns in self._stamps(NUM_ALONE)]
        added_ns = [answer.end_ns - answer.sent_ns - took_ns for answer, took_ns in zip(answers, stub_ns, strict=True)]
        self._put("added_ms", statistics.median(added_ns) / 1e6)

    async def streamed(self) -> None:
        work = self._ask(self._prompts(STREAMS, SHORT_WORDS), max_tokens=STREAM_TOKENS, in_flight=STREAMS, stream=True)
        answers = await self._timed("tokens", STREAMS * STREAM_TOKENS, work)
        if any(answer.num_events < STREAM_TOKENS for answer in answers):
            raise SystemExit(f"{self.system.name} did not send an event a token")

    async def first(self) -> None:
        answers = await self._ask(self._prompts(NUM_FIRSTS, SHORT_WORDS), max_tokens=4, in_flight=1, stream=True)
        late_ms = sorted(
            (answer.first_ns - sent_ns) / 1e6
            for answer, (_, sent_ns) in zip(answers, self._stamps(NUM_FIRSTS), strict=True)
        )
        self._put("first_ms", statistics.median(late_ms))
        self._put("first_p99_ms", late_ms[int((len(late_ms) - 1) * 0.99)])

    def median(self, name: str) -> float:
        return statistics.median(self.figures[name])

    def _prompts(self, count: int, num_words: int = PROMPT_WORDS) -> list[str]:
        """Fresh ones every time."""
        return prompts(self._next_seed(), count, num_words)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _ask(
        self, texts: Sequence[str], *, max_tokens: int, in_flight: int, stream: bool = False
    ) -> Awaitable[list[TimedAnswer]]:
        """All is written before the first is sent."""
        host, port = self.system.address
        return load(
            host, port, requests(host, self.system.model, texts, max_tokens=max_tokens, stream=stream), in_flight
        )

    async def _timed(self, name: str, count: int, work: Awaitable[list[TimedAnswer]]) -> list[TimedAnswer]:
        """Also how much of their cores the gateway, its stub and this process took."""
        loop = asyncio.get_running_loop()
        begin_s, pids = loop.time(), {"gateway": self.system.pid, "stub": self.system.stub_pid, "client": os.getpid()}
        before_s = {who: cpu_s(pid) for who, pid in pids.items()}
        answers = await work
        wall_s = loop.time() - begin_s
        took_s = {who: cpu_s(pid) - before_s[who] for who, pid in pids.items()}
        self._put(f"{name}_per_s", count / wall_s)
        self._put(f"{name}_per_core_s", count / took_s["gateway"])
        for who, seconds in took_s.items():
            self._put(f"{name}_{who}_busy", seconds / wall_s)
        return answers

    async def _until_ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    await self._ask(self._prompts(1), max_tokens=1, in_flight=1)
                    return
                except (OSError, RuntimeError):
                    await asyncio.sleep(0.2)

    def _stamps(self, count: int) -> list[tuple[int, int]]:
        """(arrived, first token sent) of the latest requests, in the order in which they came."""
        lines = self.system.stamps.read_text().splitlines()[-count:]
        return [(int(arrived), int(sent)) for _, arrived, sent in map(str.split, lines)]

    def _put(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)


async def measure(systems: Sequence[System], repeats: int) -> list[GatewayBench]:
    benches = [GatewayBench(system) for system in systems]
    for bench in benches:
        await bench.warm_up()
    for _ in range(repeats):
        for part in (
            GatewayBench.whole,
            GatewayBench.made_up,
            GatewayBench.alone,
            GatewayBench.streamed,
            GatewayBench.first,
        ):
            for bench in benches:
                await part(bench)
    return benches


COLUMNS = (
    ("requests/s", "requests_per_s", "{:,.0f}"),
    ("a core", "requests_per_core_s", "{:,.0f}"),
    ("made up", "made_up_per_core_s", "{:,.0f}"),
    ("added ms", "added_ms", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("a core", "tokens_per_core_s", "{:,.0f}"),
    ("first event ms", "first_ms", "{:.2f}"),
    ("p99", "first_p99_ms", "{:.2f}"),
)


def with_peers(home: Path, cores: Cores, directory: Path, stack: ExitStack) -> tuple[list[System], list[str]]:
    """The peers that could be installed, running, and their versions."""
    home.mkdir(parents=True, exist_ok=True)
    systems, versions = [], []
    for peer in gateway_peers.PEERS:
        python = gateway_peers.install(peer, home)
        if python is not None:
            systems.append(stack.enter_context(peer.run(home, python, cores, STEP_S, directory / peer.name)))
            versions.append(f"{peer.package} {gateway_peers.version(peer, python)}")
    return systems, versions


def busy(benches: Sequence[GatewayBench]) -> str:
    """How much of its core each part took: where the gateway's is not nearly 100 %, something else held it
    up."""
    lines = []
    for bench in benches:
        for work in ("requests", "tokens"):
            parts = ", ".join(
                f"{who} {bench.median(f'{work}_{who}_busy'):.0%}" for who in ("gateway", "stub", "client")
            )
            lines.append(f"busy with {work}, {bench.system.name}: {parts} of a core")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="where sglang-router and Dynamo are installed, to be measured, too"
    )
    parser.add_argument("--json", action="store_true", help="print every figure of every repeat as JSON, too")
    args = parser.parse_args()
    cores = Cores.split()
    os.sched_setaffinity(0, cores.others)
    print(machine("tokenizers", "grpcio", "uvicorn", "uvloop"))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        systems = [stack.enter_context(baton(cores, Path(directory, "baton")))]
        if args.peers is not None:
            peers, versions = with_peers(args.peers.absolute(), cores, Path(directory), stack)
            systems += peers
            print(", ".join(versions))
        benches = uvloop.run(measure(systems, args.repeats))
    rows = [[bench.system.name, *(form.format(bench.median(name)) for _, name, form in COLUMNS)] for bench in benches]
    print(table(["gateway", *(head for head, _, _ in COLUMNS)], rows))
    print(busy(benches))
    if args.json:
        print(json.dumps({bench.system.name: bench.figures for bench in benches}))


if __name__ == "__main__":
    main()
