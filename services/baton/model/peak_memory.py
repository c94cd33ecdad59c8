"""What the largest step takes in memory besides weights and KV: run and measured, before the rest is given to
KV."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from baton.core.errors import ModelError
from baton.core.kv.block_hash import num_blocks_for, token_ids
from baton.core.request import Sampling
from baton.engine.state.step import SampleRequest, StepPlan, StepSequence
from baton.model.backends.backend_selection import Backend
from baton.model.device.device_memory import give_back_freed
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel
from baton.model.step.step_launch import Launcher

_LOOK_S = 0.001
_DRAW = SampleRequest(
    sampling=Sampling(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, num_logprobs=20),  # what takes most: it sorts
    sample_indices=(0,),
    position=1,
    history=token_ids([0]),
    num_prompt_tokens=1,
)


@torch.inference_mode()
def measured_step_bytes(
    loaded: LoadedModel, way: Backend, *, block_size_tokens: int, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Of a step with as many sequences as may be, each of which draws a token, and with all tokens that may
    be: one has a part of a prompt. In the calling thread, which should be the one that computes. Raises
    ModelError where there is not enough for it."""
    longest = min(max(2, max_num_batched_tokens - max_num_seqs + 1), loaded.max_model_len)
    plan = _largest_step(longest, max_num_seqs, block_size_tokens)
    cache = KvCache.zeros(loaded.layout(block_size_tokens), num_blocks_for(longest, block_size_tokens), loaded.device)
    cache.blocks.zero_()  # its memory is real before the step
    launcher = Launcher(way.forward, way.kernel, cache, loaded.vocab_size)
    give_back_freed()  # or the step would have what was taken before
    try:
        with _peak(loaded.device) as peak_bytes:
            launcher.launch(plan).result()
    except torch.OutOfMemoryError as error:
        message = f"no memory for a step of {max_num_batched_tokens} tokens of {max_num_seqs} sequences on {loaded.device}: give a smaller"
        raise ModelError(
            f"{message} --max-num-batched-tokens or --max-num-seqs ({str(error).splitlines()[0]})"
        ) from error
    finally:
        del cache, launcher
        give_back_freed()
    return peak_bytes()


def _largest_step(longest: int, num_seqs: int, block_size_tokens: int) -> StepPlan:
    """All but one write to the same place: what they compute is thrown away."""
    prompt = StepSequence(
        seq_id=0,
        token_ids=token_ids([0] * longest),
        position_begin=0,
        kv_begin=0,
        block_table=tuple(range(num_blocks_for(longest, block_size_tokens))),
        sample=_DRAW,
    )
    others = [
        StepSequence(
            seq_id=seq_id, token_ids=token_ids([0]), position_begin=0, kv_begin=0, block_table=(0,), sample=_DRAW
        )
        for seq_id in range(1, num_seqs)
    ]
    return StepPlan(step_id=0, sequences=(prompt, *others))


@contextmanager
def _peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Inside, memory is watched; afterwards it can be asked by how much it had grown at most."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    process, has_ended = psutil.Process(), threading.Event()
    before = most = int(process.memory_info().rss)

    def watch() -> None:
        nonlocal most
        while not has_ended.wait(_LOOK_S):
            most = max(most, int(process.memory_info().rss))

    watching = threading.Thread(target=watch, name="peak", daemon=True)
    watching.start()
    try:
        yield lambda: most - before
    finally:
        most = max(most, int(process.memory_info().rss))
        has_ended.set()
        watching.join()
