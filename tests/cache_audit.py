"""Compares every cached block of a running cluster with plain `transformers` in float32.

    auditor = CacheAuditor(model_dir)
    found = await auditor.audit(cluster)      # raises WrongBlock or NotCovered

A worker's cached blocks are those that its generation table lists and a peer can pull. Their number must
equal the number that it reports. The tokens of a hash come from the clients' history of prompts and answers.
Every element of K and V must lie within tau of the reference. tau is ten times the largest difference between
two batchings of the reference on some of these tokens, at most `MAX_TAU`. The audit also fails if it knows
the tokens of less than `MIN_COVERAGE` of a worker's blocks.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from baton.core.client_api import ClusterStatus
from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash, chain, root_hash, token_ids
from baton.core.kv.kv_layout import KvLayout
from baton.rpc.grpc_network import GrpcNetwork
from tests.cache_reader import NUM_BLOCKS, CacheReader, cache_reader
from tests.cluster import SETTLE_S, ProcessCluster
from tests.scale import sized

MAX_TAU = 1e-3
MIN_COVERAGE = 0.9
_MEASURED_RUNS = sized(1, 3)
_KINDS = ("k", "v")


class WrongBlock(AssertionError):
    """The content of a cached block does not belong to its hash."""


class NotCovered(AssertionError):
    """The audit could check too few blocks of a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAudit:
    """Result of an audit.

    num_cached, num_compared: number of cached and of compared blocks, by worker.
    num_tokens: tokens that the reference computed.
    worst: largest difference of blocks that no earlier audit had accepted bitwise.
    """

    num_cached: dict[str, int]
    num_compared: dict[str, int]
    num_tokens: int
    tau: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens for the reference to compute, and the blocks among them to compare: {index in the run: hash}."""

    tokens: tuple[int, ...]
    blocks: dict[int, BlockHash]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Content read for a hash, float32 [num_layers, 2, num_kv_heads, block_size_tokens, head_dim].

    places: the workers and blocks that hold it.
    """

    content: np.ndarray
    digest: bytes
    places: list[str] = field(default_factory=list)


Copies = dict[BlockHash, list[Copy]]
"""Copies by hash. Workers with bitwise equal content share a copy."""


class CacheAuditor:
    """Audits caches against one model directory. Content that was accepted once is not computed again."""

    def __init__(self, model_dir: Path) -> None:
        attention = "sdpa"
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
        self._model.eval().requires_grad_(False)
        self._right: set[tuple[BlockHash, bytes]] = set()

    async def audit(self, cluster: ProcessCluster) -> CacheAudit:
        """Audit all ready workers of an idle cluster. All of them must serve this model."""
        reports = await ready_reports(cluster)
        layout = _layout(reports)
        num_cached, num_compared = Counter[str](), Counter[str]()
        comparison = Comparison(self._model, layout, self._right)
        async with cache_reader(layout, transfer=cluster.settings.get("transfer", "nixl")) as reader:
            listed = {report.worker: _by_hash(await reader.generation_table(report.worker)) for report in reports}
            histories = dict.fromkeys(tokens for got in cluster.history for tokens in got.token_chains())
            runs = plan_runs(layout, histories, wanted=frozenset().union(*listed.values()))
            for batch in _batches(runs):
                copies: Copies = {}
                for worker, blocks in listed.items():
                    hashes = [block_hash for run in batch for block_hash in run.blocks.values() if block_hash in blocks]
                    num_compared[worker.worker_id] += await _read(reader, worker, layout, hashes, blocks, copies)
                await asyncio.to_thread(comparison.check, batch, copies, runs)
            known = {block_hash for run in runs for block_hash in run.blocks.values()}
            for worker, blocks in listed.items():
                unknown = await reader.read(worker, [block_hash for block_hash in blocks if block_hash not in known])
                num_cached[worker.worker_id] = num_compared[worker.worker_id] + len(unknown)
        await _until_reported(cluster, num_cached)
        _check_coverage(num_cached, num_compared)
        return CacheAudit(
            num_cached=dict(num_cached),
            num_compared=dict(num_compared),
            num_tokens=comparison.num_tokens,
            tau=comparison.tau,
            worst=comparison.worst,
        )


class Comparison:
    """Compares block contents with the reference. `right`: accepted contents, extended by each check."""

    def __init__(self, model: torch.nn.Module, layout: KvLayout, right: set[tuple[BlockHash, bytes]]) -> None:
        self._model = model
        self._block_size = layout.block_size_tokens
        self._right = right
        self.num_tokens = 0
        self.tau = 0.0
        self.worst = 0.0

    def check(self, batch: Sequence[Run], copies: Copies, runs: Sequence[Run]) -> None:
        """Check the copies of a batch.

        Raises WrongBlock for the first wrong one. `runs`: tokens for measuring tau.
        """
        for run in batch:
            unchecked = [
                (index, block_hash, copy)
                for index, block_hash in run.blocks.items()
                for copy in copies.get(block_hash, ())
                if (block_hash, copy.digest) not in self._right
            ]
            if not unchecked:
                continue
            if not self.tau:
                self.tau = min(MAX_TAU, 10 * self._noise(runs))
            expected = self._keys_and_values(run.tokens)
            self.num_tokens += len(run.tokens)
            for index, block_hash, copy in unchecked:
                begin = index * self._block_size
                self._compare(copy, expected[..., begin : begin + self._block_size, :], run, begin, block_hash)
                self._right.add((block_hash, copy.digest))

    def _compare(self, copy: Copy, expected: np.ndarray, run: Run, begin: int, block_hash: BlockHash) -> None:
        differences = np.nan_to_num(np.abs(copy.content - expected), nan=np.inf)
        worst = float(differences.max())
        self.worst = max(self.worst, worst)
        if worst > self.tau:
            where = np.unravel_index(int(differences.argmax()), differences.shape)
            layer, kind, head, token, element = (int(index) for index in where)
            differs = differences > self.tau
            raise WrongBlock(
                f"{' and '.join(copy.places)}, hash {block_hash.hex()}, "
                f"tokens {begin} to {begin + self._block_size - 1} of a sequence: "
                f"layer {layer}, {_KINDS[kind]}, head {head}, token {begin + token}, element {element} "
                f"is {copy.content[where]:.6g} where the reference has {expected[where]:.6g} (tau {self.tau:.3g}); "
                f"{int(differs.sum())} of {differs.size} elements differ, "
                f"in layers {sorted({int(i) for i in np.nonzero(differs)[0]})}"
            )

    @torch.inference_mode()
    def _keys_and_values(self, tokens: Sequence[int], chunks: Iterable[int] = ()) -> np.ndarray:
        """Return keys and values, float32 [num_layers, 2, num_kv_heads, num_tokens, head_dim].

        chunks: lengths to compute one after the other. The rest is computed in one pass.
        """
        ids, cache, done = (
            torch.tensor([tokens]),
            DynamicCache(),
            0,
        )  # without a configuration, so that no layer keeps only a window
        for size in (*chunks, len(tokens)):
            if done < len(tokens):
                self._model(
                    input_ids=ids[:, done : done + size], past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                done += size
        layers: Any = cache.layers
        return torch.stack([torch.cat((layer.keys, layer.values)) for layer in layers]).numpy()

    def _noise(self, runs: Sequence[Run]) -> float:
        """Return the largest difference between one pass of the reference and chunked passes, as in decoding.

        It is measured on some runs, the longest one included, which comes first.
        """
        rng = random.Random(0)
        largest = 0.0
        for run in runs[:: max(1, len(runs) // _MEASURED_RUNS)]:
            left, chunks = len(run.tokens), []
            while left > 0:
                chunks.append(min(left, 1 if left < 24 else rng.choice((5, 33, left // 2, left - 20))))
                left -= chunks[-1]
            chunked, one_pass = self._keys_and_values(run.tokens, chunks), self._keys_and_values(run.tokens)
            largest = max(largest, float(np.abs(chunked - one_pass).max()))
        return largest


def plan_runs(layout: KvLayout, histories: Iterable[tuple[int, ...]], wanted: frozenset[BlockHash]) -> list[Run]:
    """Choose few tokens that cover the wanted blocks: longest histories first, each cut after its last new
    block."""
    size = layout.block_size_tokens
    root = root_hash(model_fingerprint=layout.model_fingerprint, block_size_tokens=size)
    candidates: list[tuple[int, tuple[int, ...], list[BlockHash]]] = []
    for tokens in histories:
        hashes = list(chain(root, token_ids(tokens), size))
        while hashes and hashes[-1] not in wanted:
            hashes.pop()
        if hashes:
            candidates.append((len(hashes), tokens, hashes))
    runs: list[Run] = []
    left = set(wanted)
    for _length, tokens, hashes in sorted(candidates, key=lambda candidate: -candidate[0]):
        blocks = {index: block_hash for index, block_hash in enumerate(hashes) if block_hash in left}
        if blocks:
            runs.append(Run(tokens=tokens[: (max(blocks) + 1) * size], blocks=blocks))
            left.difference_update(blocks.values())
    return runs


def _batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Group runs into batches of about as many blocks as the reader can read at once."""
    batch: list[Run] = []
    for run in runs:
        if batch and sum(len(r.blocks) for r in batch) + len(run.blocks) > NUM_BLOCKS:
            yield batch
            batch = []
        batch.append(run)
    if batch:
        yield batch


async def _read(
    reader: CacheReader,
    worker: WorkerRef,
    layout: KvLayout,
    hashes: Sequence[BlockHash],
    blocks: dict[BlockHash, list[int]],
    copies: Copies,
) -> int:
    """Read the blocks `hashes` from a worker and add them to `copies`. Return their number."""
    component = layout.groups[0].components[0]
    shape = (layout.num_layers, len(_KINDS), component.num_kv_heads, layout.block_size_tokens, component.head_dim)
    found = await reader.read(worker, hashes)
    for block_hash, content in found.items():
        digest = blake2b(content.tobytes(), digest_size=16).digest()
        same = copies.setdefault(block_hash, [])
        copy = next((copy for copy in same if copy.digest == digest), None)
        if copy is None:
            copy = Copy(content=content.view(np.float32).reshape(shape), digest=digest)
            same.append(copy)
        copy.places.append(f"{worker.worker_id} block {' or '.join(map(str, blocks[block_hash]))}")
    return len(found)


async def ready_reports(cluster: ProcessCluster) -> list[WorkerReport]:
    """Return the latest reports of all ready workers from the cluster's scheduler."""
    network = GrpcNetwork(heartbeat_s=1.0)
    try:
        watch = await network.scheduler(cluster.children["scheduler"].address).watch()
        update = await watch.receive()
        await watch.aclose()
    finally:
        await network.aclose()
    return [r for r in update.reports if r.state is WorkerState.READY and r.worker.worker_id in cluster.children]


def _layout(reports: Sequence[WorkerReport]) -> KvLayout:
    """Return the common layout. Raises NotCovered if layouts differ or are not float32 keys and values."""
    layouts = {report.layout for report in reports}
    if len(layouts) != 1:
        raise NotCovered(f"{len(reports)} workers with {len(layouts)} layouts")
    (layout,) = layouts
    parts = [(c.name, c.num_kv_heads, c.head_dim, c.dtype) for group in layout.groups for c in group.components]
    if len(layout.groups) != 1 or parts != [(kind, *parts[0][1:3], "float32") for kind in _KINDS]:
        raise NotCovered(f"the audit knows float32 keys and values of one shape, not {layout.groups}")
    return layout


def _by_hash(table: dict[int, BlockHash]) -> dict[BlockHash, list[int]]:
    blocks: dict[BlockHash, list[int]] = {}
    for block_id, block_hash in table.items():
        blocks.setdefault(block_hash, []).append(block_id)
    return blocks


async def _until_reported(cluster: ProcessCluster, num_cached: Counter[str]) -> None:
    """Wait until every worker reports as many cached blocks as could be pulled, and all leases have ended."""

    def is_reported(status: ClusterStatus) -> bool:
        audited = [w for w in status.workers if w.worker.worker_id in num_cached]
        return all(w.blocks.cached == num_cached[w.worker.worker_id] and not w.open_leases for w in audited)

    await cluster.until(
        is_reported,
        SETTLE_S,
        f"the reported cached blocks equal the pulled ones, without open leases: {dict(num_cached)}",
    )


def _check_coverage(num_cached: Counter[str], num_compared: Counter[str]) -> None:
    if not num_cached.total():
        raise NotCovered("no worker caches a block")
    for worker_id, cached in num_cached.items():
        if num_compared[worker_id] < MIN_COVERAGE * cached:
            raise NotCovered(
                f"the tokens of only {num_compared[worker_id]} of {cached} cached blocks of {worker_id} are known"
            )
