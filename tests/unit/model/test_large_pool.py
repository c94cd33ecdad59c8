"""KV pools over 4 GiB: every offset into them needs more than 32 bits. Only the used pages take memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepSequence
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends.backend_selection import choose_backend
from baton.model.device.compute_thread import compute_thread
from baton.model.device.host_staging import HostStaging
from baton.model.device.kv_tensors import KvCache
from baton.model.kernels.cpu.kernel_library import load_kernels, paged_kernel
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.torch_executor import TorchExecutor
from tests.large_pool import check_large_pool, large_cache, pool_layout, spread_blocks

SIZE = 16
FORMATS = [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")]


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_reference_attention(dtype: torch.dtype, kv_dtype: str) -> None:
    check_large_pool(paged_attention, dtype, kv_dtype)


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_native_attention(dtype: torch.dtype, kv_dtype: str) -> None:
    check_large_pool(paged_kernel(load_kernels(1)), dtype, kv_dtype)


def answers(loaded: LoadedModel, executor: TorchExecutor, blocks: list[int]) -> list[SampledToken]:
    """Return the tokens, with logprobs, of a prompt in two chunks, and of two decodes."""
    prompt = [(7 * i + 3) % loaded.vocab_size for i in range(40)]
    sample = SampleRequest(
        sampling=Sampling(max_tokens=9, temperature=0.0, num_logprobs=1),
        sample_indices=(0,),
        position=40,
        history=token_ids(prompt),
        num_prompt_tokens=40,
    )
    found: list[SampledToken] = []
    for begin, tokens in ((0, prompt[:25]), (25, prompt[25:]), (40, [5]), (41, [6])):
        part = StepSequence(
            seq_id=1,
            token_ids=token_ids(tokens),
            position_begin=begin,
            kv_begin=begin,
            block_table=tuple(blocks),
            sample=replace(sample, position=begin + len(tokens)),
        )
        result = executor.run(StepPlan(step_id=begin, sequences=(part,)))
        assert not result.failures
        found += result.samples[1]
    return found


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "int8")])
def test_steps_of_the_fastest_backend(tiny_dir: Path, dtype: str, kv_dtype: str) -> None:
    loaded = load_model(tiny_dir, dtype=dtype, kv_dtype=kv_dtype, device="cpu")
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    layout = loaded.layout(SIZE)
    large = large_cache(layout, loaded.dtype)
    found = []
    for cache, blocks in (
        (KvCache.zeros(layout, 3, dtype=loaded.dtype), [0, 1, 2]),
        (large, spread_blocks(3, large.num_blocks)),
    ):
        thread = compute_thread(1)
        found.append(answers(loaded, TorchExecutor(loaded.model, cache, thread=thread, backend=backend), blocks))
        thread.shutdown()
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_staging_copies_the_last_block() -> None:
    layout = pool_layout(torch.bfloat16, "auto")
    device, host = large_cache(layout, torch.bfloat16), large_cache(layout, torch.bfloat16)
    device.memory[-1] = 7
    staging = HostStaging(device, host.memory.numpy())
    staging.to_host([0, device.num_blocks - 1])
    assert (host.memory[-1] == 7).all()
    assert not host.memory[0].any()
    host.memory[-2] = 9
    staging.to_device([device.num_blocks - 2])
    assert (device.memory[-2] == 9).all()
    staging.close()
