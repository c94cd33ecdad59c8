"""Finds the prefixes that workers can pull from others, in any tier, and predicts which pull is the fastest.

A prefix in device or host memory is read at once. One that ends on a disk is reloaded by its holder first.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import floor

import numpy as np

from baton.core.reload_limits import MAX_PULL_S, PEER_RELOAD_SHARE
from baton.scheduler.policies.candidate_costs import LocalPrefill
from baton.scheduler.policies.cost_terms import PrefillTerms, PrefixOption
from baton.scheduler.policies.eligibility import any_worker, has_windows, readers_of, sources_of
from baton.scheduler.policies.placement_inputs import PlacementInputs
from baton.scheduler.policies.reload_costs import host_reload_s
from baton.scheduler.prediction.predict import peer_reload_limit_s, tier_reload_s
from baton.scheduler.state.worker_data import Floats, Mask

MAX_HOLDERS = 4
"""Number of workers, apart from the decode worker, considered to pull a prefix from: those that hold most of
it."""


def use_pulled_prefixes(inputs: PlacementInputs, terms: PrefillTerms, candidates: Mask, decode: int | None) -> None:
    """Let each candidate pull the prefix that makes it fastest, if any does. `decode`: the decode worker."""
    terms.holders = _prefix_holders(inputs, decode)
    terms.options = [option for holder in terms.holders for option in _options_of(inputs, holder)]
    reload_s = host_reload_s(inputs) if inputs.prompt.disk_blocks.any() else terms.reload_s.copy()
    for number, option in enumerate(terms.options):
        _consider(inputs, terms, candidates, number, option, reload_s)


def _prefix_holders(inputs: PlacementInputs, decode: int | None) -> list[int]:
    """Return the ready workers that hold most of the prefix, and the decode worker if it holds any of it.

    Ties break by what is in memory, then by the data they have to send. That sum needs the links of all
    workers, which a decision record does not keep. The decode worker is always in the record, so it does not
    compete with the others.
    """
    w, prompt = inputs.workers, inputs.prompt
    held_blocks = {i: blocks for i in prompt.held_blocks if (blocks := _most_blocks(inputs, i)) > 0}
    ready = sorted(i for i in held_blocks if w.reported.is_ready[i])
    others = [i for i in ready if i != decode]
    if len(others) <= MAX_HOLDERS:
        return ready
    queued_s = dict(zip(others, w.links.queued_s[:, others].sum(axis=0), strict=True))
    in_memory = prompt.pullable_blocks
    best = sorted(others, key=lambda i: (-held_blocks[i], -in_memory.get(i, 0), queued_s[i], i))[:MAX_HOLDERS]
    return sorted({*best, *(i for i in ready if i == decode)})


def _most_blocks(inputs: PlacementInputs, holder: int) -> float:
    """Return the leading blocks that others can pull from a worker.

    Those on its disk count only if their reload is faster than computing them there. An unknown speed is not.
    A reload that takes too long for any pull is shortened, as its owner does. With windows it is left out,
    because a shorter prefix needs other blocks.
    """
    prompt, reported = inputs.prompt, inputs.workers.reported
    num_in_memory, num_held = prompt.pullable_blocks.get(holder, 0), prompt.held_blocks[holder]
    s_per_byte = reported.disk_reload_s_per_byte.item(holder)
    if num_held == num_in_memory or not s_per_byte:
        return num_in_memory
    size, num_disk = reported.block_size_tokens.item(holder), num_held - num_in_memory
    mean_attended = (num_in_memory + num_held) * size / 2
    token_s = reported.prefill_token_s.item(holder) + reported.prefill_attended_s.item(holder) * mean_attended
    start_s, block_s = reported.disk_reload_start_s.item(holder), prompt.block_bytes.item(holder) * s_per_byte
    if start_s + num_disk * block_s >= num_disk * size * token_s:
        return num_in_memory
    num_in_time = max(0, floor((PEER_RELOAD_SHARE * MAX_PULL_S - start_s) / block_s))
    if num_in_time >= num_disk:
        return num_held
    return num_in_memory if has_windows(inputs.workers, holder) else num_in_memory + num_in_time


def _options_of(inputs: PlacementInputs, holder: int) -> list[PrefixOption]:
    """Return what a worker has in memory, and what it has after a reload from its disk, if it has either."""
    prompt, num_in_memory = inputs.prompt, inputs.prompt.pullable_blocks.get(holder, 0)
    options = [PrefixOption(holder=holder, num_blocks=num_in_memory)] if num_in_memory > 0 else []
    if (num_blocks := _most_blocks(inputs, holder)) > num_in_memory:
        num_disk, block_bytes = num_blocks - num_in_memory, prompt.block_bytes.item(holder)
        host_bytes = prompt.host_blocks.item(holder) * block_bytes
        reload_s = max(tier_reload_s(inputs.workers.row(holder), host_bytes, num_disk * block_bytes))
        options.append(PrefixOption(holder=holder, num_blocks=num_blocks, num_disk_blocks=num_disk, reload_s=reload_s))
    return options


def _consider(
    inputs: PlacementInputs,
    terms: PrefillTerms,
    candidates: Mask,
    number: int,
    option: PrefixOption,
    reload_s: Floats,
) -> None:
    """Enter the pull of an option into the terms of the candidates that it makes faster.

    The holder does not reload for longer than the pull is worth. A worker that pulls leaves its own disk
    alone. number: of the option
    reload_s: wait of each worker for what it has in host memory only
    """
    w, prompt, holder = inputs.workers, inputs.prompt, option.holder
    links, own_blocks = w.links, prompt.memory_blocks
    can_pull = candidates & (own_blocks < option.num_blocks) & readers_of(w, holder)
    if not any_worker(can_pull):
        return
    size = w.reported.block_size_tokens.item(holder)
    cached_tokens = option.num_blocks * size
    can_pull = can_pull & (option.reload_s <= peer_reload_limit_s(w, int(cached_tokens), own_blocks * size))
    compute_s = inputs.first.prefill_s(w, prompt.num_tokens, cached_tokens)
    num_bytes = (option.num_blocks - own_blocks) * prompt.block_bytes.item(holder)
    fixed_s, dial_s = links.pull_s[:, holder], links.dial_s[:, holder]
    pull_s = num_bytes * links.s_per_byte[:, holder] + links.queued_s[:, holder] + fixed_s + dial_s + option.reload_s
    is_faster = can_pull & (compute_s + pull_s + reload_s < terms.prefill_s + terms.pull_s + terms.reload_s)
    np.copyto(terms.prefill_s, compute_s, where=is_faster)
    np.copyto(terms.pull_s, pull_s, where=is_faster)
    np.copyto(terms.reload_s, reload_s, where=is_faster)
    np.copyto(terms.pull_fixed_s, fixed_s, where=is_faster)
    np.copyto(terms.dial_s, dial_s, where=is_faster)
    np.copyto(terms.cached_tokens, cached_tokens, where=is_faster)
    np.copyto(terms.source, number, where=is_faster)


def with_pulled_prefix(
    inputs: PlacementInputs, options: Sequence[PrefixOption], decode: int, local: LocalPrefill
) -> LocalPrefill:
    """Return the local prefill with the pull that makes it fastest, or unchanged if none does."""
    w, prompt, row, links = inputs.workers, inputs.prompt, inputs.workers.row(decode), inputs.workers.links
    if not options:
        return local
    best, sources = local, sources_of(w, decode)
    for number, option in enumerate(options):
        holder = option.holder
        held_tokens = option.num_blocks * row.reported.block_size_tokens
        if held_tokens <= local.memory_tokens or not sources[holder]:
            continue
        if option.reload_s > peer_reload_limit_s(row, int(held_tokens), local.memory_tokens):
            continue
        missing_blocks = (held_tokens - local.memory_tokens) / row.reported.block_size_tokens
        num_bytes = missing_blocks * prompt.block_bytes.item(decode)
        fixed_s, dial_s = links.pull_s.item(decode, holder), links.dial_s.item(decode, holder)
        pull_s = num_bytes * links.s_per_byte.item(decode, holder) + links.queued_s.item(decode, holder)
        pull_s += fixed_s + dial_s + option.reload_s
        compute_s = local.first.prefill_s(row, prompt.num_tokens, held_tokens)
        if compute_s + pull_s + local.host_reload_s < best.prefill_s + best.pull_s + best.reload_s:
            best = replace(
                local,
                cached_tokens=held_tokens,
                prefill_s=compute_s,
                pull_s=pull_s,
                reload_s=local.host_reload_s,
                pull_fixed_s=fixed_s,
                dial_s=dial_s,
                source=number,
            )
    return best
