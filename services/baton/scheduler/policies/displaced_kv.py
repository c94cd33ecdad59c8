"""Predicts what a placement costs later requests, because its blocks evict theirs."""

from baton.scheduler.policies.placement_inputs import PlacementInputs
from baton.scheduler.prediction.predict import unloaded_prefill_s
from baton.scheduler.state.worker_data import Floats


def displaced_terms_s(inputs: PlacementInputs) -> Floats:
    """Return the seconds in which later requests will compute what each worker evicts for this prompt.

    A worker stores what it does not hold of the prompt, and evicts as many blocks. It has measured which
    share of evicted blocks is computed again (`engine.retention.evicted_reuse`). The time is that of an idle
    worker, because the load of the time to come is not known.
    """
    w, prompt = inputs.workers, inputs.prompt
    return w.reported.evicted_reuse * unloaded_prefill_s(w, prompt.num_tokens, prompt.overlap_tokens)
