"""Scheduling policies: one pure function per file, from a query and a snapshot to a choice.

`POLICIES` lists them by the name used in the configuration. To add a policy, add its file and its line here.
"""

from collections.abc import Mapping

from baton.scheduler.policies.kv_centric import kv_centric
from baton.scheduler.policies.least_loaded import least_loaded
from baton.scheduler.policies.policy_types import Policy
from baton.scheduler.policies.prefix_aware import prefix_aware
from baton.scheduler.policies.random import random
from baton.scheduler.policies.round_robin import round_robin

POLICIES: Mapping[str, Policy] = {
    "kv_centric": kv_centric,
    "prefix_aware": prefix_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": random,
}

__all__ = ["POLICIES", "Policy"]
