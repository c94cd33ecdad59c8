"""Measures whether a cluster with a disk tier is warm after a restart of all of its processes.

python -m bench kv_restart --out DIR [--models demo,tiny-42m] [--prompts 10] [--tokens 1024] [--repeats 5]

One prefill and one decode worker run the model on this machine. Each repeat starts with an empty disk. It
sends each prompt twice, waits until all blocks are on the disk, and sends each once more: this is *warm*, and
finds its prefix in device memory. Then all processes end, and new ones start. Each prompt is sent twice:
*restarted*, whose KV was on the disk, and *again*. Then as many new prompts are sent (*new*). The processes
end once more, and others start: here as many short prompts come first (*short*), so that they include the
cost of new processes, and then the prompts whose KV was on the disk (*restarted, after short*). Requests run
one after the other, with pauses of REST_S. Answers to a prompt must have the same tokens each time. The files
stay in the page cache of the system, which is not restarted.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.client_api import ClusterStatus
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_prompts import REST_S, random_prompts
from bench.support.saved_figures import SavedFigures, emptied
from bench.systems.baton_cluster import Processes, machine, processes_up, table
from bench.systems.engines import COMMON, LIMIT_S, EngineFailed, vocabulary
from bench.systems.serving_systems import SERVED
from loadgen.send.client import ResolvedRequest, send_once
from loadgen.send.http.http_client import HttpClient, HttpSettings
from loadgen.send.timers import now_s

NUM_OUTPUTS = 16
KV_BYTES = 512 * 2**20
BLOCK_SIZE_TOKENS = 16
STORED_S, STORED_POLL_S = 120.0, 0.2
SHORT_TOKENS = 32
PHASES = ("warm", "restarted", "again", "new", "short", "restarted, after short")
OTHER_PROMPTS = ("new", "short")


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to all prompts: TTFT in seconds, share of the prompt tokens that was cached, and all tokens."""

    ttfts_s: list[float]
    cached: float
    tokens: list[list[int]]


def answers(running: Processes, prompts: Sequence[Sequence[int]]) -> Answers:
    """Send the prompts one after the other. Raises EngineFailed if a request fails."""
    return asyncio.run(_answers(running.url, prompts))


async def _answers(url: str, prompts: Sequence[Sequence[int]]) -> Answers:
    client = HttpClient(HttpSettings(urls=(url,), model=SERVED, dialect=COMMON, more={"temperature": 0}))
    await client.open()
    found = Answers([], 0.0, [])
    num_cached = 0
    try:
        client.preconnect(1, 1)
        for index, prompt in enumerate(prompts):
            await asyncio.sleep(REST_S)
            began_s = now_s()
            answer = await send_once(
                client, ResolvedRequest(index=index, token_ids=list(prompt), max_tokens=NUM_OUTPUTS), LIMIT_S
            )
            if not answer.is_successful:
                raise EngineFailed(f"{url}: {answer.status} {answer.error or answer.reason}")
            found.ttfts_s.append(answer.times[0] - began_s)
            found.tokens.append(list(answer.token_ids))
            num_cached += answer.num_cached_tokens or 0
    finally:
        await client.aclose()
    return Answers(found.ttfts_s, num_cached / sum(map(len, prompts)), found.tokens)


def wait_for_disks(running: Processes, num_blocks: int) -> None:
    """Block until each worker has `num_blocks` blocks on its disk. Raises SystemExit after `STORED_S`."""

    async def status() -> ClusterStatus:
        async with open_channel(running.grpc_address, channel_options(5.0)) as channel:
            return await AdminClient(channel, running.grpc_address).status()

    end_s, held = time.monotonic() + STORED_S, 0
    while time.monotonic() < end_s:
        workers = asyncio.run(status()).workers
        held = min(sum(tier.held for tier in worker.tiers if tier.tier == "disk") for worker in workers)
        if held >= num_blocks:
            return
        time.sleep(STORED_POLL_S)
    raise SystemExit(f"after {STORED_S:g} s a disk holds {held} of {num_blocks} blocks")


def one_repeat(arguments: argparse.Namespace, model: Path, out: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return TTFTs and cached shares of all phases. Raises SystemExit if tokens differ between phases."""
    rng, size = random.Random(seed), vocabulary(model)
    prompts = random_prompts(arguments.prompts, arguments.tokens, size, rng)
    settings = {
        "model": str(model),
        "served_model_name": SERVED,
        "kv_memory": KV_BYTES,
        "disk_kv": str(out / "kv"),
        "disk_kv_size": 2 * KV_BYTES,
        "block_size_tokens": BLOCK_SIZE_TOKENS,
    }
    found: dict[str, Answers] = {}
    with processes_up(prefill=1, decode=1, logs=out / "logs", **settings) as running:
        first = answers(running, prompts)
        found["second"] = answers(running, prompts)
        wait_for_disks(running, arguments.prompts * (arguments.tokens // BLOCK_SIZE_TOKENS - 1))
        found["warm"] = answers(running, prompts)
    with processes_up(prefill=1, decode=1, logs=out / "logs", **settings) as running:
        found["restarted"] = answers(running, prompts)
        found["again"] = answers(running, prompts)
        found["new"] = answers(running, random_prompts(arguments.prompts, arguments.tokens, size, rng))
    with processes_up(prefill=1, decode=1, logs=out / "logs", **settings) as running:
        found["short"] = answers(running, random_prompts(arguments.prompts, SHORT_TOKENS, size, rng))
        found["restarted, after short"] = answers(running, prompts)
    if any(of.tokens != first.tokens for phase, of in found.items() if phase not in OTHER_PROMPTS):
        raise SystemExit(f"the tokens after the restart differ; logs in {out}")
    return {
        phase: {
            "first_ms": 1e3 * of.ttfts_s[0],
            "median_ms": 1e3 * statistics.median(of.ttfts_s),
            "cached": of.cached,
        }
        for phase in PHASES
        for of in (found[phase],)
    }


def main() -> None:
    """Run the benchmark and print a row for each model and phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures and logs")
    parser.add_argument("--models", default="demo,tiny-42m", help="comma-separated (demo,tiny-42m)")
    parser.add_argument("--prompts", type=int, default=10, help="prompts of a repeat (10)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--repeats", type=int, default=5, help="restarts of each model (5)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    saved = SavedFigures(arguments.out / "kv_restart.json")
    saved.setdefault("machine", machine("torch"))
    rows = []
    for model in arguments.models.split(","):
        directory, found = model_directory(model, arguments.out), saved.get(model, [])
        while len(found) < arguments.repeats:
            out = emptied(arguments.out / f"{model}-{len(found)}")
            found.append(one_repeat(arguments, directory, out, 1 + len(found)))
            saved[model] = found
            print(model, found[-1], file=sys.stderr)
        for phase in PHASES:
            of = {name: statistics.median(each[phase][name] for each in found) for name in found[0][phase]}
            rows.append([model, phase, f"{of['first_ms']:.1f}", f"{of['median_ms']:.1f}", f"{100 * of['cached']:.1f}"])
    print(saved["machine"])
    print(table(["model", "phase", "TTFT of the first, ms", "median TTFT, ms", "cached %"], rows))


if __name__ == "__main__":
    main()
