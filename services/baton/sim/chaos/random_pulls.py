"""A policy for storms: workers at random, and pulls of cached prefixes from random peers and tiers.

`kv_centric` rarely pulls the short prompts of a storm, because computing them is as fast.
"""

from dataclasses import replace
from random import Random

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.messages.jobs import PrefixSource
from baton.scheduler.policies.policy_types import Choice, PolicyContext
from baton.scheduler.policies.random import random

RANDOM_PULLS = f"{__name__}:random_pulls"
"""Name of the policy in the settings."""


def random_pulls(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Choose as `random`. The prefix source is a random worker that holds some of the prompt, if possible on
    its disk only."""
    choice = random(query, cluster, context)
    if isinstance(choice, Rejection):
        return choice
    computing = choice.prefill or choice.decode
    holders = [
        (view.worker, overlap)
        for view in cluster.workers
        if view is not computing and (overlap := cluster.overlaps.get(view.worker_id)) and overlap.num_held_blocks
    ]
    if not holders:
        return choice
    on_disk = [(worker, overlap) for worker, overlap in holders if overlap.num_disk_blocks]
    worker, overlap = Random(f"{context.seed} pull").choice(on_disk or holders)
    source = PrefixSource(worker=worker, num_blocks=overlap.num_held_blocks, num_disk_blocks=overlap.num_disk_blocks)
    return replace(choice, prefix_source=source)
