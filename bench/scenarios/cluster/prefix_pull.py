"""Measures the TTFT of a prompt whose 4,096-token prefix is pulled from a peer against computing the prefix.

python -m bench prefix_pull [--repeats 9] [--tokens 4096] [--json]

Two prefill workers run the demo model. The script sends them prefill jobs as a gateway does. In each repeat
one worker computes a new prompt. Then the other worker gets two jobs:

pulled: the same prompt and `OWN_TOKENS` more, with the first worker as prefix source.
computed: another new prompt of the same length, without a prefix source.

The order of the two and the roles of the workers change between repeats. Times count from sending the job to
its first token. Nothing else runs meanwhile, so both workers have all cores.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from itertools import count
from pathlib import Path
from random import Random

from baton.core.ids import JobId, WorkerRef
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import PrefillJob, PrefixSource
from baton.core.request import LegTimeline, Sampling
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from baton.rpc.grpc_network import GrpcNetwork
from bench.systems.baton_cluster import machine, processes_up, table
from tests.unit.worker.scripted_gateway import Gateway

OWN_TOKENS = 16
BLOCK_SIZE_TOKENS = 16
NUM_WARM = 2
KV_MIB = 512
NUMBER = count()


async def worker_refs(grpc_address: str) -> dict[str, WorkerRef]:
    """Return all workers of the cluster by worker id."""
    async with open_channel(grpc_address, channel_options(5.0)) as channel:
        status = await AdminClient(channel, grpc_address).status()
    return {w.worker.worker_id: w.worker for w in status.workers}


async def first_token(
    gateway: Gateway, prompt: list[int], source: PrefixSource | None = None
) -> tuple[float, LegTimeline]:
    """Run one prefill job. Return its seconds and the timeline that the worker reports."""
    job = JobId(request_id=next(NUMBER).to_bytes(16, "big"), attempt=0)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    gateway.send(
        PrefillJob(
            job=job,
            token_ids=token_ids(prompt),
            num_prompt_tokens=len(prompt),
            sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
            sample_indices=(0,),
            deadline_s=60.0,
            prefix_source=source,
        )
    )
    delta = await gateway.ended_prefill(job)
    took_s = loop.time() - began_s
    assert delta.timeline is not None
    return took_s, delta.timeline


async def measure(grpc_address: str, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each repeat, by kind.

    Raises SystemExit if a prefix was not pulled, or if tokens of a new prompt were cached.
    """
    refs = await worker_refs(grpc_address)
    network, rng = GrpcNetwork(heartbeat_s=2.0), Random(0)
    gateways = {worker_id: Gateway(network, ref) for worker_id, ref in refs.items() if worker_id[0] == "p"}
    for gateway in gateways.values():
        await gateway.connect()
    seconds: dict[str, list[float]] = {"pulled": [], "computed": []}

    def new_prompt(length: int) -> list[int]:
        return [rng.randrange(4, 4096) for _ in range(length)]

    for repeat in range(-NUM_WARM, repeats):
        holder, other = ("p0", "p1") if repeat % 4 < 2 else ("p1", "p0")
        held = new_prompt(num_tokens)
        await first_token(gateways[holder], held)
        for kind in ("pulled", "computed") if repeat % 2 else ("computed", "pulled"):
            prompt = [*(held if kind == "pulled" else new_prompt(num_tokens)), *new_prompt(OWN_TOKENS)]
            source = (
                PrefixSource(worker=refs[holder], num_blocks=num_tokens // BLOCK_SIZE_TOKENS)
                if kind == "pulled"
                else None
            )
            took_s, leg = await first_token(gateways[other], prompt, source)
            if leg.num_cached_tokens != (num_tokens if kind == "pulled" else 0):
                raise SystemExit(
                    f"{kind}: {leg.num_cached_tokens} cached tokens are not as expected; see the workers' logs"
                )
            if repeat >= 0:
                seconds[kind].append(took_s)
    await network.aclose()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="jobs of each kind (9)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prefix (4096)")
    parser.add_argument("--logs", type=Path, help="directory for the logs of all processes (default: not kept)")
    parser.add_argument("--json", action="store_true", help="also print one line of JSON")
    arguments = parser.parse_args()
    print(f"{machine('torch', 'nixl')}\n")
    with tempfile.TemporaryDirectory() as directory:
        logs = arguments.logs or Path(directory)
        settings = {"model": "demo", "kv_memory": KV_MIB * 2**20, "policy": "kv_centric"}
        with processes_up(prefill=2, decode=1, logs=logs, **settings) as running:
            seconds = asyncio.run(measure(running.grpc_address, arguments.tokens, arguments.repeats))
    rows = [
        [kind, f"{1e3 * statistics.median(took):.0f}", f"{1e3 * min(took):.0f}", f"{1e3 * max(took):.0f}"]
        for kind, took in seconds.items()
    ]
    print(table([f"{arguments.tokens:,} tokens", "first token ms, median", "minimum", "maximum"], rows))
    times = statistics.median(seconds["computed"]) / statistics.median(seconds["pulled"])
    print(f"\npulling is {times:.1f} times as fast as computing")
    if arguments.json:
        print(
            json.dumps(
                {
                    "tokens": arguments.tokens,
                    "times_as_fast": times,
                    **{f"{kind}_s": took for kind, took in seconds.items()},
                }
            )
        )


if __name__ == "__main__":
    main()
