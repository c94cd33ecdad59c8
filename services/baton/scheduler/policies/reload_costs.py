"""Predicts what workers reload of a prompt from their slower tiers, and how long they wait for it."""

import numpy as np

from baton.scheduler.policies.placement_inputs import PlacementInputs
from baton.scheduler.prediction.predict import (
    FirstTokenTerms,
    Prompt,
    ReloadTerms,
    exposed_reload_s,
    first_token,
    share_computed_again,
)
from baton.scheduler.state.worker_data import Floats, WorkerRow


def reload_terms_s(inputs: PlacementInputs) -> Floats:
    """Predict the wait of each worker for what it has in a slower tier only."""
    w, prompt = inputs.workers, inputs.prompt
    if not prompt.reloaded_blocks.any():
        return np.zeros(len(w.views))
    first, size = inputs.first, w.reported.block_size_tokens
    device_tokens = prompt.overlap_tokens - prompt.reloaded_blocks * size
    terms = ReloadTerms(
        host_bytes=prompt.host_blocks * prompt.block_bytes,
        disk_bytes=prompt.disk_blocks * prompt.block_bytes,
        saved_s=first.prefill_s(w, prompt.num_tokens, device_tokens) - inputs.own_prefill_s,
        disk_saved_s=first.prefill_s(w, prompt.num_tokens, prompt.memory_blocks * size) - inputs.own_prefill_s,
    )
    return exposed_reload_s(w, terms, first.queue_s)


def host_reload_s(inputs: PlacementInputs) -> Floats:
    """Predict the wait of each worker for what it has in host memory only, if it leaves its disk alone."""
    w, prompt, first = inputs.workers, inputs.prompt, inputs.first
    size, nothing = w.reported.block_size_tokens, np.zeros(len(w.views))
    device_blocks = prompt.overlap_blocks - prompt.reloaded_blocks
    device_s = first.prefill_s(w, prompt.num_tokens, device_blocks * size)
    terms = ReloadTerms(
        host_bytes=prompt.host_blocks * prompt.block_bytes,
        disk_bytes=nothing,
        saved_s=device_s - first.prefill_s(w, prompt.num_tokens, prompt.memory_blocks * size),
        disk_saved_s=nothing,
    )
    return exposed_reload_s(w, terms, first.queue_s)


def reload_of(
    prompt: Prompt,
    i: int,
    row: WorkerRow,
    first: FirstTokenTerms[float],
    cached_tokens: float,
    disk_blocks: float,
) -> ReloadTerms[float]:
    """Return what worker `i` reloads of the `cached_tokens` that it has in any tier, `disk_blocks` of its
    disk."""
    host_blocks, block_bytes = prompt.host_blocks.item(i), prompt.block_bytes.item(i)
    size = row.reported.block_size_tokens
    memory_tokens = cached_tokens - disk_blocks * size
    prefill_s = first.prefill_s(row, prompt.num_tokens, cached_tokens)
    return ReloadTerms(
        host_bytes=host_blocks * block_bytes,
        disk_bytes=disk_blocks * block_bytes,
        saved_s=first.prefill_s(row, prompt.num_tokens, memory_tokens - host_blocks * size) - prefill_s,
        disk_saved_s=first.prefill_s(row, prompt.num_tokens, memory_tokens) - prefill_s,
    )


def _blocks_computed_again(inputs: PlacementInputs, i: int, blocks: float, disk_blocks: float) -> float:
    """Return how many of worker `i`'s blocks it computes again, because that is faster than a reload.

    blocks: that it has in any tier, `disk_blocks` of them on its disk
    """
    prompt, host_blocks = inputs.prompt, inputs.prompt.host_blocks.item(i)
    if not host_blocks and not disk_blocks:
        return 0.0
    row = inputs.workers.row(i)
    cached_tokens = blocks * row.reported.block_size_tokens
    first = first_token(row, inputs.query, cached_tokens)
    reload = reload_of(prompt, i, row, first, cached_tokens, disk_blocks)
    of_host, of_disk = share_computed_again(row, reload, first.queue_s)
    return of_host * host_blocks + of_disk * disk_blocks


def local_blocks(inputs: PlacementInputs, decode: int) -> float:
    """Return the leading blocks with which the decode worker can begin a local prefill.

    Blocks that a decode worker is only expected to hold come from the worker that computes them, so they
    cannot shorten one.
    """
    prompt = inputs.prompt
    if inputs.workers.reported.can_prefill[decode]:
        return prompt.overlap_blocks.item(decode)
    return prompt.held_blocks.get(decode, 0)


def own_blocks_of(inputs: PlacementInputs, computing: int, *, is_local: bool, uses_disk: bool) -> int:
    """Return the blocks that the worker which computes the prompt has and does not compute again.

    is_local: it is the decode worker. uses_disk: it reloads from its disk, because it pulls no prefix.
    """
    disk_blocks = inputs.prompt.disk_blocks.item(computing)
    blocks = local_blocks(inputs, computing) if is_local else inputs.prompt.overlap_blocks.item(computing)
    if not uses_disk:
        blocks, disk_blocks = blocks - disk_blocks, 0.0
    return int(blocks - _blocks_computed_again(inputs, computing, blocks, disk_blocks))
