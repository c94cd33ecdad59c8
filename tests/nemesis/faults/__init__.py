"""The kinds of faults, one module each.

A fault is a context manager: it is injected at the begin of its scope and undone at the end.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from tests.nemesis.faults import (
    clock,
    kill,
    kv_disk,
    log_disk,
    lost_node,
    partition,
    pause,
    redis_flush,
    redis_full,
    redis_restart,
)
from tests.nemesis.plan import Fault
from tests.nemesis.world import World

Inject = Callable[[World, Fault], AbstractAsyncContextManager[None]]

FAULTS: Mapping[str, Inject] = {
    "kill": kill.kill,
    "kill_service": kill.kill,
    "lost_node": lost_node.lost_node,
    "pause": pause.pause,
    "cut_control": partition.partition,
    "cut_data": partition.partition,
    "redis_stop": pause.pause,
    "redis_full": redis_full.redis_full,
    "redis_flush": redis_flush.redis_flush,
    "redis_restart": redis_restart.redis_restart,
    "clock": clock.clock,
    "log_disk": log_disk.log_disk,
    "disk_full": kv_disk.disk_full,
    "disk_slow": kv_disk.disk_slow,
    "disk_damaged": kv_disk.disk_damaged,
    "disk_killed": kv_disk.disk_killed,
}
"""Faults by the kinds of a plan."""
