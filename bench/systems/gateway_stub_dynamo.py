"""Stub worker behind Dynamo's frontend. It computes nothing and runs in Dynamo's virtual environment.

python -m bench.systems.gateway_stub_dynamo STEP_S STAMPS MODEL_DIR

Sends the first token as soon as a request arrives, then one token per step, as `gateway_stub` does. Prints
`ready` once it is registered.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

from bench.support.gateway_load import Stamps

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 600


class StubWorker:
    """Streams tokens at a fixed rate per request. After a late token, the next ones follow sooner."""

    def __init__(self, step_s: float, stamps: Stamps) -> None:
        self._step_s = step_s
        self._stamps = stamps

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Stream the tokens of one request in Dynamo's format."""
        loop = asyncio.get_running_loop()
        arrived_ns = self._stamps.now_ns()
        max_tokens = request["stop_conditions"]["max_tokens"]
        self._stamps.put(max_tokens, arrived_ns)
        due_s = loop.time()
        for index in range(max_tokens):
            if index and (left_s := due_s - loop.time()) > 0:
                await asyncio.sleep(left_s)
            due_s += self._step_s
            finish = "length" if index + 1 == max_tokens else None
            yield {"token_ids": [FIRST_TOKEN_ID + index % NUM_TOKEN_IDS], "finish_reason": finish}


async def main(step_s: float, stamps: Stamps, model_dir: str) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("bench.backend.generate")
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        model_dir,
        "demo",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=16,
    )
    print("ready", flush=True)
    await endpoint.serve_endpoint(StubWorker(step_s, stamps).generate)


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), Stamps(Path(sys.argv[2])), sys.argv[3]))
