"""Tests KV in int8: what is stored, how exact attention is, and that the bytes depend on nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from baton.core.errors import LayoutMismatch
from baton.core.kv.block_hash import chain, root_hash, token_ids
from baton.core.kv.kv_layout import KvLayout, kv_components, layer_groups
from baton.core.messages.peer_messages import FirstToken
from baton.engine.kv_cache.block_pool import BlockPool
from baton.model.attention.attention_inputs import AttentionParams, AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends.backend_selection import Backend, choose_backend
from baton.model.device.kv_quantization import dequantize, quantize
from baton.model.device.kv_tensors import KvCache, TokenSlots
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels, paged_kernel
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.step.step_inputs import PackedStep, PreparedSequence, pack
from baton.runtime.network.in_process_network import InProcessNetwork
from baton.transfer.backends.host_memory import allocate_shared
from baton.transfer.backends.local_backend import LocalBackend
from baton.transfer.integrity.generation_table import MemoryGenerationTable
from baton.transfer.owner.owner_service import OwnerService
from baton.transfer.reader.kv_reader import KvReader
from tests import builders
from tests.random_kv import numbers_of, small_layout
from tests.unit.model.test_paged_attention import check_step
from tests.unit.transfer.transfer_rig import OWNER, READER, PeerEnd, times

SIZE = 16
NUM_BLOCKS = 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels(1)


def rows_of_all_kinds(dtype: torch.dtype) -> torch.Tensor:
    """Return rows [num_rows, 96] that are large, small, zero, subnormal, one-sided, or have an outlier."""
    rows = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-6, 4, 40)[:, None]
    rows[3], rows[4], rows[5, 1:] = 0.0, rows[4].abs(), 1e-3
    rows[6] = 1e-40
    rows[7, 3] = 300.0
    rows[8] = -rows[8].abs()
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_moves_by_at_most_half_a_step(dtype: torch.dtype) -> None:
    """The bound is half a step of the ideal scale, and a quarter of one where bfloat16 rounds the scale."""
    rows = rows_of_all_kinds(dtype)
    steps, scales = quantize(rows)
    exact = rows.double().numpy()
    found = steps.double().numpy() * scales.double().numpy()[:, None]
    ideal = np.abs(exact).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - exact) <= 0.5 * ideal * (1 + 2**-8) + 1e-37).all()
    assert steps.min() >= -127
    assert not found[3].any()


def test_a_row_does_not_depend_on_other_rows() -> None:
    rows = rows_of_all_kinds(torch.bfloat16)
    together = quantize(rows)
    for i, row in enumerate(rows):
        alone = quantize(row)
        assert torch.equal(alone[0], together[0][i])
        assert torch.equal(alone[1], together[1][i])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_so(wrong: float) -> None:
    rows = torch.ones(2, 64)
    rows[1, 5] = wrong
    found = dequantize(*quantize(rows), torch.float32)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "size"), [(2, 96, 16), (3, 6, 1), (1, 64, 4)])
def test_kernels_and_torch_store_the_same_bytes(
    dtype: torch.dtype, heads: int, dim: int, size: int, kernels: Kernels
) -> None:
    num_tokens, layout = 11, small_layout(size=size, heads=heads, dim=dim, dtype=dtype, kv_dtype="int8")
    by_torch, by_kernel = (KvCache.zeros(layout, 12, dtype=dtype) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    qkv = (torch.randn(num_tokens, 4 * heads * dim, generator=generator) * 3).to(dtype)
    key, value = qkv.view(num_tokens, 4, heads, dim)[:, 2:].permute(1, 2, 0, 3)
    place = np.random.default_rng(0).permutation(12 * size)[:num_tokens]
    by_torch.write(1, TokenSlots(torch.from_numpy(place // size), torch.from_numpy(place % size)), key, value)
    kernels.rope_and_store_kv(qkv, by_kernel, 1, place[None], None)
    assert by_torch.memory.any()
    assert torch.equal(by_torch.memory, by_kernel.memory)


def random_step(layout: KvLayout, dtype: torch.dtype) -> tuple[AttentionStep, torch.Tensor, torch.Tensor]:
    """Return a step over random KV that `KvCache.write` has stored, and the unrounded keys and values.

    Their shape is [heads, context, dim].
    """
    context, chunk = 300, 9
    cache = KvCache.zeros(layout, 40, dtype=dtype)
    cache.fill_with_nan()
    heads, dim = cache.uniform_shape
    blocks = np.random.default_rng(0).permutation(40)[: -(-context // SIZE)]
    generator = torch.Generator().manual_seed(5)
    key, value = (torch.randn(heads, context, dim, generator=generator).to(dtype) for _ in range(2))
    index = np.arange(context)
    slots = TokenSlots(torch.from_numpy(blocks[index // SIZE]), torch.from_numpy(index % SIZE))
    cache.write(1, slots, key, value)
    segments = [
        Segment(token_begin=0, num_tokens=1, kv_begin=context - 1, block_ids=blocks.astype(np.int64)),
        Segment(token_begin=1, num_tokens=chunk, kv_begin=context - chunk, block_ids=blocks.astype(np.int64)),
    ]
    return AttentionStep(cache, segments, CausalMasks(dtype, cache.device), paged_attention), key, value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (2, 2, 80), (32, 1, 128)])
def test_attention_error_is_bounded(
    dtype: torch.dtype, use_kernels: bool, heads: int, kv_heads: int, dim: int, kernels: Kernels
) -> None:
    """Compare with attention to the unrounded KV in float64.

    Half a step of each key moves a score by at most `moved`, so weights change by a factor within e^(2
    moved). Half a step of the values adds to that.
    """
    step, key, value = random_step(
        small_layout(size=SIZE, heads=kv_heads, dim=dim, dtype=dtype, kv_dtype="int8"), dtype
    )
    query = torch.randn(heads, 10, dim, generator=torch.Generator().manual_seed(6)).to(dtype)
    kernel = paged_kernel(kernels) if use_kernels else paged_attention
    for window in (None, 21):
        found = kernel(query, 1, step, dim**-0.5, window).double()
        for row in range(10):
            end = 300 if row == 0 else 291 + row
            begin = 0 if window is None else end - window
            for head in range(heads):
                keys, values = (x[head // (heads // kv_heads), begin:end].double() for x in (key, value))
                q = query[head, row].double()
                weights = (keys @ q * dim**-0.5).softmax(0)
                rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
                half_step = 0.5 * (1 + 2**-8) / 127
                moved = dim**-0.5 * q.abs().sum() * (keys.abs().max() * half_step + rounding * 0.1)
                bound = values.abs().max() * (torch.expm1(2 * moved) + half_step + 2 * rounding)
                assert (found[row, head] - weights @ values).abs().max() <= bound


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("use_kernels", [False, True], ids=["torch", "kernels"])
def test_decodes_and_chunks_together(window: int | None, use_kernels: bool, kernels: Kernels) -> None:
    spans = [(0, 1), (1, 1), (3, 1), (4, 1), (7, 3), (0, 5), (19, 1), (20, 1), (40, 1), (5, 8), (0, 4), (31, 1)]
    kernel = paged_kernel(kernels) if use_kernels else paged_attention
    check_step(spans, window, kernel=kernel, kv_dtype="int8")
    check_step(spans, window, kernel=kernel, kv_dtype="int8", dtype=torch.bfloat16)


def test_layouts_that_no_kernel_reads_are_refused() -> None:
    components = kv_components(num_kv_heads=2, head_dim=8, dtype="float32", kv_dtype="int8")
    for wrong in (components[:3], components[::-1], components[:1] * 2):
        with pytest.raises(LayoutMismatch, match="layer 1"):
            KvCache.zeros(builders.layout(groups=layer_groups([(components, 0), (wrong, 0)])), 2)


@pytest.fixture(scope="module")
def int8_model(tiny_dir: Path) -> tuple[LoadedModel, Backend]:
    """Return a model in bfloat16 with KV in int8, and the verified backend for it."""
    loaded = load_model(tiny_dir, dtype="bfloat16", kv_dtype="int8", device="cpu")
    return loaded, choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)


class Sequences:
    """Prompts over one KV memory, computed a step at a time."""

    def __init__(self, int8_model: tuple[LoadedModel, Backend], lengths: list[int]) -> None:
        self._loaded, self._backend = int8_model
        layout = self._loaded.layout(SIZE)
        self.memory = allocate_shared(NUM_BLOCKS, layout.block_bytes)
        self.cache = KvCache.over(self.memory.kv.reshape(-1).data, layout, self._loaded.dtype)
        self.cache.fill_with_nan()
        self._masks = CausalMasks(self.cache.dtype, self.cache.device)
        rng = np.random.default_rng(3)
        free = list(range(NUM_BLOCKS))
        Random(len(lengths)).shuffle(free)
        self.tokens = [rng.integers(0, 256, length) for length in lengths]
        self.tables = [np.array([free.pop() for _ in range(-(-n // SIZE))]) for n in lengths]

    def run(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """Compute tokens [begin, end) of sequences, as (sequence, begin, end). Returns the last logits of
        each."""
        parts = [
            PreparedSequence(
                seq_id=seq,
                token_ids=self.tokens[seq][begin:end],
                position_begin=begin,
                kv_begin=begin,
                block_ids=self.tables[seq][: -(-end // SIZE)],
                sample=None,
            )
            for seq, begin, end in spans
        ]
        step: PackedStep = pack(parts, self.cache, self._masks, self._backend.kernel)
        ends = torch.tensor([end - begin for _, begin, end in spans]).cumsum(0) - 1
        with torch.inference_mode():
            output = self._backend.forward(
                PackedStep(
                    attention=step.attention,
                    token_ids=step.token_ids,
                    position_ids=step.position_ids,
                    sample_rows=ends,
                )
            )
        assert output.finite.all()
        return output.logits

    def kv(self, seq: int, num_blocks: int | None = None) -> list[torch.Tensor]:
        """Return the KV of the first blocks of a sequence; None: of its full blocks."""
        own = self.tables[seq][: len(self.tokens[seq]) // SIZE if num_blocks is None else num_blocks]
        return [numbers_of(layer)[:, own] for layer in self.cache.layers]


@contextmanager
def computing(*models: Sequences) -> Iterator[None]:
    try:
        yield
    finally:
        for each in models:
            del each.cache
            each.memory.close()


def test_chunks_and_batches_do_not_change_stored_bytes(int8_model: tuple[LoadedModel, Backend]) -> None:
    """With bfloat16 dot products a layer's output is bit-identical, so the stored bytes must be, too."""
    if not load_kernels(1).has_bf16_dot:
        return
    whole, parts = Sequences(int8_model, [90, 50]), Sequences(int8_model, [90, 50, 33])
    parts.tokens[:2] = whole.tokens
    with computing(whole, parts):
        logits = torch.cat([whole.run([(0, 0, 90)]), whole.run([(1, 0, 50)])])
        parts.run([(0, 0, 37), (2, 0, 20)])
        parts.run([(1, 0, 49), (0, 37, 38), (2, 20, 33)])
        again = parts.run([(0, 38, 90), (1, 49, 50)])
        assert torch.equal(logits, again)
        for seq in range(2):
            for one, other in zip(whole.kv(seq), parts.kv(seq), strict=True):
                assert torch.equal(one, other)


async def test_a_pulled_prompt_continues_as_one_that_was_computed_here(
    int8_model: tuple[LoadedModel, Backend],
) -> None:
    """Owner and reader have pools and generations of their own. Blocks move with their scales."""
    owner, reader = Sequences(int8_model, [80]), Sequences(int8_model, [80])
    reader.tokens, layout, network = owner.tokens, owner.cache.layout, InProcessNetwork()
    with computing(owner, reader):
        pools, backends = [], []
        for worker, each in ((OWNER, owner), (READER, reader)):
            table = MemoryGenerationTable(each.memory.generation_table, worker.worker_epoch)
            pools.append(BlockPool(NUM_BLOCKS, SIZE, table))
            backends.append(LocalBackend(worker=worker, layout=layout, memory=each.memory))
        service = OwnerService(
            worker=OWNER, layout=layout, backend=backends[0], pins=pools[0], lookup=pools[0].lookup,
            lease_s=9.0, claim_timeout_s=9.0, reorder_window_s=1.0,
        )  # fmt: skip
        network.add_worker(OWNER.address, PeerEnd(service))
        kv_reader = KvReader(
            worker=READER, layout=layout, backend=backends[1], network=network, pool=pools[1], rng=Random(0),
            times=times(lease_s=9.0),
        )  # fmt: skip
        job, root = builders.job_id(), root_hash(model_fingerprint=layout.model_fingerprint, block_size_tokens=SIZE)
        hashes = tuple(chain(root, token_ids(owner.tokens[0][:75].tolist()), SIZE))
        blocks = pools[0].allocate(5) or []
        owner.tables[0] = np.array(blocks)
        service.create(job, READER)
        service.allocated(job, blocks, hashes)
        owner.run([(0, 0, 75)])
        for block_id, block_hash in zip(blocks, hashes, strict=False):
            pools[0].set_hash(block_id, block_hash)
        service.announce(job, 75, final=True, first_tokens=[FirstToken(sample_index=0, token_id=1)])

        pull = kv_reader.pull(OWNER, job, have_blocks=0, expected=hashes)
        await pull.first_ready()
        receiving = pools[1].allocate_receiving(5) or []
        reader.tables[0] = np.array(receiving)
        pull.receive_into(dict(enumerate(receiving)), 0)
        assert (await pull.done()).transfer_bytes == 5 * layout.block_bytes
        assert pools[1].lookup(hashes) == receiving[:4]
        for one, other in zip(owner.kv(0, num_blocks=5), reader.kv(0, num_blocks=5), strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        for at in range(75, 80):
            assert torch.equal(reader.run([(0, at, at + 1)]), owner.run([(0, at, at + 1)]))
        for part in (kv_reader, service, network, *backends):
            await part.aclose()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernels_setting", ["auto", "torch"])
def test_backends_are_verified_with_int8(tiny_dir: Path, dtype: str, kernels_setting: str) -> None:
    loaded = load_model(tiny_dir, dtype=dtype, kv_dtype="int8", device="cpu")
    backend = choose_backend(loaded, kernels=kernels_setting, num_threads=1, block_size_tokens=SIZE)
    assert (backend.name == "torch") == (kernels_setting == "torch")


def test_split_rows_attend_with_the_scales(kernels: Kernels) -> None:
    """A tile of one row reads the same numbers as tiles of many rows."""
    layout = small_layout(size=SIZE, heads=2, dim=64, dtype=torch.bfloat16, kv_dtype="int8")
    step, _, _ = random_step(layout, torch.bfloat16)
    query = torch.randn(4, 10, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    together = paged_kernel(kernels)(query, 1, step, 0.125, None)
    for row in range(10):
        alone = torch.empty(1, 4, 64, dtype=torch.bfloat16)
        kernels.attend(
            query.transpose(0, 1)[row : row + 1].contiguous(),
            alone,
            step.cache,
            1,
            step.tables_for_rows(np.array([row])),
            AttentionParams(0.125, None),
        )
        near = 0.0 if kernels.has_bf16_dot else 1e-2
        torch.testing.assert_close(alone[0], together[row], atol=near, rtol=0)
