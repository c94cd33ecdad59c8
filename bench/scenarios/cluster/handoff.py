"""Measures the exposed time of a KV handoff between two workers against the time of a decode step.

python -m bench handoff [--repeats 9] [--lengths 128,512,2048,8192] [--in-flight 1,4] [--transfer nixl]

A cluster with one prefill (P) and one decode worker (D) transfers KV with `--transfer`. Times count from
P's last KvReady message. Figures are medians.

waiting: until the last read begins.
transfer: until the blocks of that read have arrived at D and are validated.
admission: until D's first step with the sequence starts.
early: share of the bytes that D had read when P's last chunk ended.
step: D's mean time between tokens in the same responses.

Target: waiting + admission within one decode step + 10 ms, and early at least 80 % from four chunks on.
"""

import argparse
import asyncio
import json
import random
import statistics
from itertools import chain
from typing import Any

import httpx

from bench.systems.baton_cluster import baton_up, machine, table

CHUNK_TOKENS = 512
OUTPUT_TOKENS = 16
VOCAB = 4096


async def send_request(client: httpx.AsyncClient, url: str, rng: random.Random, length: int) -> dict[str, Any]:
    """Send one new prompt. Return the timeline of its decode leg, with the mean step time as `step_s`."""
    body = {
        "model": "demo",
        "prompt": [rng.randrange(4, VOCAB) for _ in range(length)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "timeline": True,
        "temperature": 0,
    }
    answer = await client.post(f"{url}/v1/completions", json=body)
    answer.raise_for_status()
    timeline = answer.json()["baton"]
    leg = next(leg for leg in timeline["legs"] if leg["kv_bytes"])
    return {**leg, "step_s": leg["decode_s"] / (OUTPUT_TOKENS - 1)}


async def measure(url: str, lengths: list[int], repeats: int, in_flight: int) -> list[list[str]]:
    """Return one table row per length. The lengths alternate, so that machine drift affects all of them."""
    rng = random.Random(in_flight)
    legs: dict[int, list[dict[str, Any]]] = {length: [] for length in lengths}
    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(send_request(client, url, rng, length) for length in lengths))
        for _ in range(repeats):
            for length in lengths:
                requests = (send_request(client, url, rng, length) for _ in range(in_flight))
                legs[length] += await asyncio.gather(*requests)
    rows = []
    for length, measured in legs.items():
        waiting, admission, step = (
            _median_ms(measured, key) for key in ("kv_exposed_wait_s", "kv_admission_s", "step_s")
        )
        transfer = statistics.median((leg["kv_exposed_s"] - leg["kv_exposed_wait_s"]) * 1e3 for leg in measured)
        early = statistics.median(leg["kv_early_bytes"] / leg["kv_bytes"] for leg in measured)
        exposed_ms = statistics.median((leg["kv_exposed_wait_s"] + leg["kv_admission_s"]) * 1e3 for leg in measured)
        is_met = "yes" if exposed_ms <= step + 10 and (length < 4 * CHUNK_TOKENS or early >= 0.8) else "no"
        kib = statistics.median(leg["kv_bytes"] for leg in measured) / 1024
        rows.append(
            [
                str(in_flight),
                f"{length:,}",
                f"{kib:,.0f}",
                f"{waiting:.1f}",
                f"{transfer:.1f}",
                f"{admission:.1f}",
                f"{exposed_ms:.1f}",
                f"{step:.1f}",
                f"{early:.0%}",
                is_met,
            ]
        )
    return rows


def _median_ms(legs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(leg[key] for leg in legs) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="requests per length (9), times those in flight")
    parser.add_argument("--lengths", default="128,512,2048,8192", help="prompt tokens (128,512,2048,8192)")
    parser.add_argument("--in-flight", default="1,4", help="requests sent together (1,4)")
    parser.add_argument(
        "--transfer", default="nixl", choices=["nixl", "local", "collective", "auto"], help="transfer backend (nixl)"
    )
    parser.add_argument("--json", action="store_true", help="also print the rows as JSON")
    args = parser.parse_args()
    print(machine("torch", "transformers", "nixl", "ray"))
    lengths = [int(length) for length in args.lengths.split(",")]
    rows: list[list[str]] = []
    settings = {
        "--max-num-batched-tokens": str(CHUNK_TOKENS),
        "--kv-memory": "512MiB",
        "--transfer": args.transfer,
        "--policy": "round_robin",  # kv_centric would let D compute some prompts itself
    }
    with baton_up(*chain.from_iterable(settings.items())) as url:
        for in_flight in map(int, args.in_flight.split(",")):
            rows += asyncio.run(measure(url, lengths, args.repeats, in_flight))
    head = [
        "in flight",
        "prompt tokens",
        "KiB",
        "waiting ms",
        "transfer ms",
        "admission ms",
        "waiting + admission",
        "step ms",
        "early",
        "target met",
    ]
    print(table(head, rows))
    if args.json:
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
