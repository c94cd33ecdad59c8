"""Predicts what a placement costs later requests, because its blocks evict theirs."""

from baton.scheduler.policies.placement_inputs import PlacementInputs
from baton.scheduler.state.worker_data import Floats


def displaced_terms_s(inputs: PlacementInputs) -> Floats:
    """Return the seconds in which later requests will compute what each worker evicts for this prompt.

    A worker stores what it does not hold of the prompt, and evicts as many blocks. What share of them is
    computed again, it has measured (`engine.retention.evicted_reuse`).
    """
    return inputs.workers.reported.evicted_reuse * inputs.own_prefill_s
