"""Measures requests and tokens per second of `baton gateway` on one core against sglang-router and Dynamo.

python -m bench gateway [--repeats 5] [--peers DIR] [--json]

The gateway runs alone on one core. A stub cluster and the clients run on the other cores. All figures are
medians, and the gateways are measured in alternation, so that machine drift affects all of them.

requests/s: non-streaming requests with 1,000 random words and one output token, 32 in flight.
random letters: the same, per core, with words of random letters, so that no cache of words helps.
added ms: latency with one request in flight, minus the time in the stub.
tokens/s: 64 streams with short prompts. The stub sends more tokens than any of the gateways can carry.
first event ms: from the moment when the worker sends the first token to the client's first event, with one
  request in flight on a kept-alive connection.
per core: rate per second of CPU time that the gateway used. The wall clock also includes waiting for clients.

With --peers, sglang-router and Dynamo's frontend are measured as well, each with its own kind of stub. Their
virtual environments are created in DIR if they are missing.
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

from bench.support.gateway_load import TimedAnswer, load, prompts, random_letter_prompts, requests
from bench.systems import gateway_peers
from bench.systems.baton_cluster import machine, table
from bench.systems.gateway_process import Cores, System, cpu_s, started

PROMPT_WORDS, IN_FLIGHT = 1000, 32
SHORT_WORDS, STREAMS, STREAM_TOKENS, STEP_S = 8, 64, 300, 0.0015
NUM_REQUESTS, NUM_RANDOM_LETTERS, NUM_SEQUENTIAL, NUM_FIRST_EVENTS = 1000, 300, 100, 100
READY_S = 30.0


@contextmanager
def baton_gateway(cores: Cores, stamps: Path, *more: str) -> Iterator[System]:
    """Run `baton gateway` in front of the stub cluster. `more` are additional flags of the gateway."""
    with started([sys.executable, "-m", "bench.systems.gateway_stub", str(STEP_S), str(stamps)], cores.others) as (
        stub_pid,
        scheduler,
    ):
        flags = ["--schedulers", scheduler, "--http-port", "0", "--grpc-port", "0", "--log-level", "error", *more]
        with started([str(Path(sys.executable).parent / "baton"), "gateway", *flags], cores.gateway) as (pid, url):
            yield System(name="baton", url=url, model="demo", pid=pid, stub_pid=stub_pid, stamps=stamps)


class GatewayBench:
    """Measures one gateway. `figures` has one value per repeat under each name."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.figures: dict[str, list[float]] = {}
        self._seed = 0

    async def warm_up(self) -> None:
        """Wait until the gateway responds, then send some load that is not counted."""
        await self._until_ready()
        await self._ask(self._prompts(NUM_REQUESTS), max_tokens=1, in_flight=IN_FLIGHT)
        await self._ask(self._prompts(STREAMS, SHORT_WORDS), max_tokens=20, in_flight=STREAMS, stream=True)

    async def non_streaming(self) -> None:
        """Measure requests per second with prompts of ordinary words."""
        work = self._ask(self._prompts(NUM_REQUESTS), max_tokens=1, in_flight=IN_FLIGHT)
        await self._timed("requests", NUM_REQUESTS, work)

    async def random_letters(self) -> None:
        """Measure requests per second with words that no cache can contain."""
        texts = random_letter_prompts(self._next_seed(), NUM_RANDOM_LETTERS, PROMPT_WORDS)
        await self._timed("random_letters", NUM_RANDOM_LETTERS, self._ask(texts, max_tokens=1, in_flight=IN_FLIGHT))

    async def sequential(self) -> None:
        """Measure the latency that the gateway adds, with one request in flight."""
        answers = await self._ask(self._prompts(NUM_SEQUENTIAL), max_tokens=1, in_flight=1)
        stub_ns = [sent_ns - arrived_ns for arrived_ns, sent_ns in self._stamps(NUM_SEQUENTIAL)]
        added_ns = [answer.end_ns - answer.sent_ns - took_ns for answer, took_ns in zip(answers, stub_ns, strict=True)]
        self._put("added_ms", statistics.median(added_ns) / 1e6)

    async def streamed(self) -> None:
        """Measure streamed tokens per second."""
        work = self._ask(self._prompts(STREAMS, SHORT_WORDS), max_tokens=STREAM_TOKENS, in_flight=STREAMS, stream=True)
        answers = await self._timed("tokens", STREAMS * STREAM_TOKENS, work)
        if any(answer.num_events < STREAM_TOKENS for answer in answers):
            raise SystemExit(
                f"{self.system.name} sent fewer than {STREAM_TOKENS} events per stream; it must send one per token"
            )

    async def first_event(self) -> None:
        """Measure the delay from the worker's first token to the client's first event."""
        answers = await self._ask(self._prompts(NUM_FIRST_EVENTS, SHORT_WORDS), max_tokens=4, in_flight=1, stream=True)
        late_ms = sorted(
            (answer.first_ns - sent_ns) / 1e6
            for answer, (_, sent_ns) in zip(answers, self._stamps(NUM_FIRST_EVENTS), strict=True)
        )
        self._put("first_ms", statistics.median(late_ms))
        self._put("first_p99_ms", late_ms[int((len(late_ms) - 1) * 0.99)])

    def median(self, name: str) -> float:
        """Return the median of a figure over the repeats."""
        return statistics.median(self.figures[name])

    def _prompts(self, count: int, num_words: int = PROMPT_WORDS) -> list[str]:
        """Return prompts that were not used before."""
        return prompts(self._next_seed(), count, num_words)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _ask(
        self, texts: Sequence[str], *, max_tokens: int, in_flight: int, stream: bool = False
    ) -> Awaitable[list[TimedAnswer]]:
        """Send the requests. All of them are encoded before the first one is sent."""
        host, port = self.system.address
        return load(
            host, port, requests(host, self.system.model, texts, max_tokens=max_tokens, stream=stream), in_flight
        )

    async def _timed(self, name: str, count: int, work: Awaitable[list[TimedAnswer]]) -> list[TimedAnswer]:
        """Await `work` and note its rate, and the CPU time of the gateway, its stub and this process."""
        loop = asyncio.get_running_loop()
        begin_s, pids = loop.time(), {"gateway": self.system.pid, "stub": self.system.stub_pid, "client": os.getpid()}
        before_s = {part: cpu_s(pid) for part, pid in pids.items()}
        answers = await work
        wall_s = loop.time() - begin_s
        took_s = {part: cpu_s(pid) - before_s[part] for part, pid in pids.items()}
        self._put(f"{name}_per_s", count / wall_s)
        self._put(f"{name}_per_core_s", count / took_s["gateway"])
        for part, seconds in took_s.items():
            self._put(f"{name}_{part}_busy", seconds / wall_s)
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
        """Return (arrived_ns, first_token_sent_ns) of the latest requests in order of arrival."""
        lines = self.system.stamps.read_text().splitlines()[-count:]
        return [(int(arrived), int(sent)) for _, arrived, sent in map(str.split, lines)]

    def _put(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)


async def measure(systems: Sequence[System], repeats: int) -> list[GatewayBench]:
    """Run every measurement `repeats` times, going through the systems each time."""
    benches = [GatewayBench(system) for system in systems]
    for bench in benches:
        await bench.warm_up()
    for _ in range(repeats):
        for part in (
            GatewayBench.non_streaming,
            GatewayBench.random_letters,
            GatewayBench.sequential,
            GatewayBench.streamed,
            GatewayBench.first_event,
        ):
            for bench in benches:
                await part(bench)
    return benches


COLUMNS = (
    ("requests/s", "requests_per_s", "{:,.0f}"),
    ("per core", "requests_per_core_s", "{:,.0f}"),
    ("random letters", "random_letters_per_core_s", "{:,.0f}"),
    ("added ms", "added_ms", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("per core", "tokens_per_core_s", "{:,.0f}"),
    ("first event ms", "first_ms", "{:.2f}"),
    ("p99", "first_p99_ms", "{:.2f}"),
)


def start_peers(home: Path, cores: Cores, directory: Path, stack: ExitStack) -> tuple[list[System], list[str]]:
    """Start the peers that can be installed. Return them and their versions."""
    home.mkdir(parents=True, exist_ok=True)
    systems, versions = [], []
    for peer in gateway_peers.PEERS:
        python = gateway_peers.install(peer, home)
        if python is not None:
            systems.append(stack.enter_context(peer.run(home, python, cores, STEP_S, directory / peer.name)))
            versions.append(f"{peer.package} {gateway_peers.version(peer, python)}")
    return systems, versions


def cpu_use(benches: Sequence[GatewayBench]) -> str:
    """Return lines with the CPU use of gateway, stub and client.

    If the gateway is well below 100 % of its core, another part limited the rate.
    """
    lines = []
    for bench in benches:
        for work in ("requests", "tokens"):
            parts = ", ".join(
                f"{part} {bench.median(f'{work}_{part}_busy'):.0%}" for part in ("gateway", "stub", "client")
            )
            lines.append(f"CPU use with {work}, {bench.system.name}: {parts} of a core")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each figure (5)")
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="also measure sglang-router and Dynamo, installed in DIR"
    )
    parser.add_argument("--json", action="store_true", help="also print every figure of every repeat as JSON")
    args = parser.parse_args()
    cores = Cores.split()
    os.sched_setaffinity(0, cores.others)
    print(machine("tokenizers", "grpcio", "uvicorn", "uvloop"))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        systems = [stack.enter_context(baton_gateway(cores, Path(directory, "baton")))]
        if args.peers is not None:
            peers, versions = start_peers(args.peers.absolute(), cores, Path(directory), stack)
            systems += peers
            print(", ".join(versions))
        benches = uvloop.run(measure(systems, args.repeats))
    rows = [[bench.system.name, *(form.format(bench.median(name)) for _, name, form in COLUMNS)] for bench in benches]
    print(table(["gateway", *(head for head, _, _ in COLUMNS)], rows))
    print(cpu_use(benches))
    if args.json:
        print(json.dumps({bench.system.name: bench.figures for bench in benches}))


if __name__ == "__main__":
    main()
