"""Which blocks are copied out, how fast, and when a reload pays."""

import math

import pytest

from baton.core.errors import ConfigError
from baton.core.step_cost import StepCostModel
from baton.engine.kv_cache.sizing import MAX_TIER_RATIO, TIER_SHARE, num_tier_slots
from baton.engine.tiers import copy_policy as policy
from baton.engine.tiers.copy_speed import CopySpeed
from tests.builders import layout

COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=1e-8, decode_seq_s=1e-4, decode_context_s=1e-8
)
LAYOUT = layout()
BLOCK = LAYOUT.block_bytes
MIB = 2**20


@pytest.mark.parametrize(
    ("is_reused", "compute_s", "reload_s", "is_worth"),
    [
        (True, 0.001, 1.0, True),
        (True, None, None, True),
        (False, 0.004, 0.001, True),
        (False, 0.0039, 0.001, False),
        (False, None, 0.001, False),
        (False, 1.0, None, False),
    ],
)
def test_blocks_are_copied_at_their_second_use_or_if_computing_them_takes_far_longer(
    is_reused: bool, compute_s: float | None, reload_s: float | None, is_worth: bool
) -> None:
    assert policy.is_worth_copying(is_reused=is_reused, compute_s=compute_s, reload_s=reload_s) is is_worth


@pytest.mark.parametrize(
    ("compute_s", "reload_s", "pays"),
    [(0.00125, 0.001, True), (0.0012, 0.001, False), (None, 0.001, True), (0.001, None, True)],
)
def test_a_reload_must_be_clearly_faster(compute_s: float | None, reload_s: float | None, pays: bool) -> None:
    assert policy.reload_pays(compute_s=compute_s, reload_s=reload_s) is pays


@pytest.mark.parametrize(
    ("compute_s", "wait_s"),
    [(None, policy.MAX_RELOAD_WAIT_S), (0.4, 0.4), (0.001, policy.MIN_RELOAD_WAIT_S), (60.0, policy.MAX_RELOAD_WAIT_S)],
)
def test_a_job_waits_for_its_reload_as_long_as_computing_takes(compute_s: float | None, wait_s: float) -> None:
    assert policy.reload_wait_s(compute_s) == wait_s


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_a_block_is_computed_as_a_part_of_a_chunk(chunk_tokens: int) -> None:
    one_s = policy.block_compute_s(COSTS, 16, chunk_tokens)
    assert one_s * chunk_tokens / 16 == pytest.approx(COSTS.prefill_s(chunk_tokens, 0, chunk_tokens))


def test_copies_take_at_most_their_share_of_the_time() -> None:
    for copy_s in (1e-5, 0.002, 0.3):
        pause_s = policy.pause_after_s(copy_s)
        assert copy_s / (copy_s + pause_s) == pytest.approx(policy.MAX_STEP_DELAY)


@pytest.mark.parametrize(
    ("num_allocatable", "block_bytes", "most"),
    [(1000, 64 * 1024, 128), (1000, 16 * MIB, 1), (8, 64 * 1024, 2), (3, 64 * 1024, 0), (0, 1, 0)],
)
def test_a_copy_is_small_and_leaves_blocks_to_sequences(num_allocatable: int, block_bytes: int, most: int) -> None:
    assert policy.max_copied_blocks(num_allocatable, block_bytes, None, num_before=1000) == most


@pytest.mark.parametrize(("block_s", "most"), [(1e-9, 250), (policy.MAX_COPY_S / 4.5, 4), (1.0, 1), (0.0, 128)])
def test_a_copy_for_which_reloads_wait_is_short(block_s: float, most: int) -> None:
    assert policy.max_copied_blocks(1000, 65536, block_s, num_before=1000) == most


@pytest.mark.parametrize(("num_before", "most"), [(0, 16), (3, 16), (16, 32), (200, 250)])
def test_a_copy_is_at_most_twice_the_one_before(num_before: int, most: int) -> None:
    assert policy.max_copied_blocks(1000, 65536, 1e-9, num_before=num_before) == most


def test_speed_is_averaged_over_bytes() -> None:
    speed = CopySpeed()
    assert speed.s_per_byte is None
    speed.observe(MIB, 0.0)
    assert speed.s_per_byte is None, "shorter than the clock's resolution"
    speed.observe(MIB, 0.001)
    assert speed.s_per_byte == pytest.approx(0.001 / MIB)
    for _ in range(200):
        speed.observe(MIB, 0.004)
    assert speed.s_per_byte == pytest.approx(0.004 / MIB, rel=0.05)


def slots(host_kv_memory: int | None, *, free: int = 1000 * BLOCK, is_host: bool = False, num_sharing: int = 1) -> int:
    return num_tier_slots(
        LAYOUT, 100, free=free, host_kv_memory=host_kv_memory, is_host=is_host, num_sharing=num_sharing
    )


def test_the_default_is_a_share_of_free_memory_with_a_gpu_and_nothing_on_a_cpu() -> None:
    assert slots(None, free=200 * BLOCK) == 200 * TIER_SHARE
    assert slots(None, free=200 * BLOCK, num_sharing=4) == 200 * TIER_SHARE / 4
    assert slots(None, free=10**6 * BLOCK) == MAX_TIER_RATIO * 100
    assert slots(None, free=-5) == slots(None, is_host=True) == 0


def test_a_size_is_taken_as_it_is() -> None:
    assert slots(0) == 0
    assert slots(30 * BLOCK + 5) == 30
    assert slots(1000 * BLOCK, is_host=True) == 1000


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (1000 * BLOCK + 1, r"--host-kv-memory is .*; must be at most "),
        (BLOCK - 1, "must be 0, or at least one block of "),
    ],
)
def test_a_size_that_does_not_fit_is_refused(size: int, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        slots(size)


@pytest.mark.parametrize(
    ("compute_s", "reload_s", "gain_s"),
    [(1.0, 0.5, 0.5), (1.0, 0.9, None), (1.0, 2.0, None), (None, 1.0, math.inf), (1.0, None, math.inf)],
)
def test_what_a_reload_saves(compute_s: float | None, reload_s: float | None, gain_s: float | None) -> None:
    assert policy.reload_gain_s(compute_s=compute_s, reload_s=reload_s) == gain_s


@pytest.mark.parametrize(
    ("compute_s", "wait_s"),
    [(1.0, 1.0), (0.0, policy.MIN_RELOAD_WAIT_S), (1e6, policy.MAX_RELOAD_WAIT_S), (None, policy.MAX_RELOAD_WAIT_S)],
)
def test_a_job_waits_as_long_as_computing_takes(compute_s: float | None, wait_s: float) -> None:
    assert policy.reload_wait_s(compute_s) == wait_s
