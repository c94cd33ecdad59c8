"""One pure function a file, from a query and a snapshot to a choice. `POLICIES` names them for the configuration."""

from collections.abc import Mapping

from baton.scheduler.policies.choice import Policy
from baton.scheduler.policies.least_loaded import least_loaded
from baton.scheduler.policies.round_robin import round_robin

POLICIES: Mapping[str, Policy] = {"round_robin": round_robin, "least_loaded": least_loaded}

__all__ = ["POLICIES", "Policy"]
