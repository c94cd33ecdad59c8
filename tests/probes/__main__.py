"""Runs the probes against a gateway and prints what they found. Exits with 1 if a limit is exceeded."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

from tests.probes import input_probes, output_probes, store_probes
from tests.probes.result import Finding
from tests.probes.target import Target

PROBES: dict[str, Callable[[Target], Awaitable[list[Finding]]]] = {
    "stop-strings": input_probes.stop_strings,
    "trailers": input_probes.trailers,
    "grpc-messages": input_probes.unfinished_grpc_messages,
    "legal-bodies": input_probes.legal_bodies,
    "unread-responses": output_probes.unread_responses,
    "large-response": output_probes.large_response,
    "readers-at-once": output_probes.readers_at_once,
    "full-store": store_probes.full_store,
    "flushed-store": store_probes.flushed_store,
}


async def run(target: Target, names: list[str]) -> bool:
    """Run probes one after another and print each finding. Return whether all are within their limits."""
    is_good = True
    for name in names:
        try:
            findings = await PROBES[name](target)
        except Exception as error:  # a gateway that ends or hangs is a finding, too
            findings = [Finding(f"{type(error).__name__}: {error}", 1, 0, "")]
        for finding in findings:
            sys.stdout.write(f"{name}: {finding}\n")
            sys.stdout.flush()
            is_good &= finding.is_good
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.probes", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="HTTP API of the gateway")
    parser.add_argument("--grpc-port", type=int, default=8001, help="port of its gRPC API")
    parser.add_argument("--pid", type=int, required=True, help="process id of the gateway")
    parser.add_argument("--redis", default=None, help="URL of the cluster's Redis; without it, it is not filled")
    parser.add_argument("--only", default=",".join(PROBES), help="comma-separated names of probes")
    arguments = parser.parse_args()
    target = Target(url=arguments.url, grpc_port=arguments.grpc_port, pid=arguments.pid, redis_url=arguments.redis)
    return 0 if asyncio.run(run(target, arguments.only.split(","))) else 1


if __name__ == "__main__":
    sys.exit(main())
