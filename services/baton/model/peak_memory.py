"""Measures the peak memory of the largest possible step, besides weights and KV. The rest of the memory goes
to KV."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import torch

from baton.core.errors import ModelError
from baton.core.kv.block_hash import num_blocks_for, token_ids
from baton.core.request import Sampling
from baton.core.request_limits import LIMITS
from baton.engine.scheduling.batcher import MAX_PROMPT_ROWS
from baton.engine.state.step import PromptRequest, SampleRequest, StepPlan, StepSequence
from baton.model.backends.backend_selection import Backend
from baton.model.device.device_info import device_name, free_bytes, release_freed_memory
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel
from baton.model.software_facts import PYTHON_AND_CPP, software_facts
from baton.model.step.step_launch import StepLauncher
from baton.runtime import user_cache
from baton.runtime.child.verdict_cache import VerdictCache

KEPT_S = 86_400.0
"""Time after which a host measures again, because it may have been short of memory the first time."""
_POLL_INTERVAL_S = 0.001
_COSTLIEST_SAMPLE = SampleRequest(
    # top_p makes the sampler sort the vocabulary, which takes the most memory.
    sampling=Sampling(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, num_logprobs=20),
    sample_indices=(0,),
    position=1,
    history=token_ids([0]),
    num_prompt_tokens=1,
)


def known_step_bytes(
    loaded: LoadedModel,
    backend: Backend,
    *,
    block_size_tokens: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_threads: int,
    cache: VerdictCache | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> int:
    """Return what `measure_step_bytes` returns. On a host it is kept for later starts of such a worker.

    On a GPU it is measured at each start, because it depends on what other processes do with the GPU. Raises
    ModelError if it is measured and there is not enough memory for the step.
    """
    measure = partial(
        measure_step_bytes,
        loaded,
        backend,
        block_size_tokens=block_size_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    if loaded.device.type != "cpu":
        return measure()
    cache = cache or VerdictCache(user_cache.cache_directory("step-bytes"))
    limits = (block_size_tokens, max_num_batched_tokens, max_num_seqs, loaded.max_model_len)
    facts = {
        **software_facts(PYTHON_AND_CPP),
        "model": loaded.model_fingerprint,
        "dtypes": f"{loaded.dtype} {loaded.kv_dtype} {loaded.weight_format}",
        "backend": backend.name,
        "processor": device_name(loaded.device),
        "num_threads": str(num_threads),
        "limits": " ".join(str(each) for each in (*limits, MAX_PROMPT_ROWS, _max_prompt_logprobs())),
    }
    kept = cache.find(facts) or {}
    num_bytes, at_s = kept.get("bytes"), kept.get("measured_at_s")
    if type(num_bytes) is int and num_bytes >= 0 and type(at_s) is float and 0 <= wall_clock() - at_s < KEPT_S:
        return num_bytes
    measured = measure()
    cache.keep(facts, {"bytes": measured, "measured_at_s": wall_clock()})
    return measured


def _max_prompt_logprobs() -> int:
    return int(LIMITS["prompt_logprobs"].maximum or 0)


@torch.inference_mode()
def measure_step_bytes(
    loaded: LoadedModel,
    backend: Backend,
    *,
    block_size_tokens: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    free_bytes: Callable[[torch.device], int] = free_bytes,
) -> int:
    """Run the largest step that the limits allow and return by how many bytes it raises memory use.

    The step has `max_num_seqs` sequences that each sample a token, and `max_num_batched_tokens` tokens in
    all. Call it in the compute thread. Raises ModelError if there is not enough memory for the step.

    free_bytes: bytes that can still be allocated on a device.
    """
    longest = min(max(2, max_num_batched_tokens - max_num_seqs + 1), loaded.max_model_len)
    plan = _largest_step(longest, max_num_seqs, block_size_tokens)
    layout, num_blocks = loaded.layout(block_size_tokens), num_blocks_for(longest, block_size_tokens)
    step = f"a step of {max_num_batched_tokens} tokens of {max_num_seqs} sequences"
    remedy = "give a smaller --max-num-batched-tokens or --max-num-seqs"
    release_freed_memory()  # else it would not count as free
    needed, free = num_blocks * layout.block_bytes, free_bytes(loaded.device)
    if needed > free:  # else the system might end this process
        raise ModelError(
            f"no memory on {loaded.device} for {step}: its KV takes {needed >> 20} MiB, and {free >> 20} MiB are free: "
            f"{remedy}"
        )
    cache: KvCache | None = None
    launcher: StepLauncher | None = None
    try:
        cache = KvCache.zeros(layout, num_blocks, loaded.device, loaded.dtype)
        cache.memory.zero_()  # allocate the pages before the measurement
        launcher = StepLauncher(backend.forward, backend.kernel, cache, loaded.vocab_size)
        gc.collect()  # else garbage that is collected during the step would be subtracted from its memory
        release_freed_memory()  # else the step would reuse it, and the peak would be too low
        with _watch_peak_memory(loaded.device) as peak_bytes:
            launcher.launch(plan).result()
    except torch.OutOfMemoryError as error:
        problem = str(error).splitlines()[0]
        raise ModelError(f"no memory on {loaded.device} for {step}: {remedy} ({problem})") from error
    finally:
        del cache, launcher
        release_freed_memory()
    return peak_bytes()


def _largest_step(longest: int, num_seqs: int, block_size_tokens: int) -> StepPlan:
    """Return a step with one long prompt chunk and one token for each other sequence.

    All sequences but the first write to block 0; their results are not used.
    """
    prompt = StepSequence(
        seq_id=0,
        token_ids=token_ids([0] * longest),
        position_begin=0,
        kv_begin=0,
        block_table=tuple(range(num_blocks_for(longest, block_size_tokens))),
        sample=_COSTLIEST_SAMPLE,
        prompt=PromptRequest(
            targets=token_ids([0] * min(longest - 1, MAX_PROMPT_ROWS)),
            num_logprobs=_max_prompt_logprobs(),
        )
        if longest > 1
        else None,
    )
    others = [
        StepSequence(
            seq_id=seq_id,
            token_ids=token_ids([0]),
            position_begin=0,
            kv_begin=0,
            block_table=(0,),
            sample=_COSTLIEST_SAMPLE,
        )
        for seq_id in range(1, num_seqs)
    ]
    return StepPlan(step_id=0, sequences=(prompt, *others))


@contextmanager
def _watch_peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Record peak memory use inside the block. The yielded function returns its growth in bytes, afterwards.

    On a host this samples the process's own memory every millisecond. Pages of files do not count: those of
    mapped weights may have to be read again.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    process, is_done = psutil.Process(), threading.Event()

    def own_bytes() -> int:
        found = process.memory_info()
        return int(found.rss - getattr(found, "shared", 0))

    before = peak_bytes_seen = own_bytes()

    def watch() -> None:
        nonlocal peak_bytes_seen
        while not is_done.wait(_POLL_INTERVAL_S):
            peak_bytes_seen = max(peak_bytes_seen, own_bytes())

    thread = threading.Thread(target=watch, name="peak", daemon=True)
    thread.start()
    try:
        yield lambda: peak_bytes_seen - before
    finally:
        peak_bytes_seen = max(peak_bytes_seen, own_bytes())
        is_done.set()
        thread.join()
