"""What steps cost, as people write it:
`step=8ms,prefill_token=60us,prefill_attended=2ns,decode_seq=50us,decode_context=60ns`."""

from baton.core.step_cost import StepCostModel
from baton.runtime.config.durations import parse_durations

_TERMS = ("step", "prefill_token", "prefill_attended", "decode_seq", "decode_context")


def parse_step_costs(text: str) -> StepCostModel:
    """The costs in `text`, in any order; a term that is left out costs nothing. Raises ValueError naming the
    term that is wrong."""
    seconds = parse_durations(text, _TERMS)
    if not sum(seconds.values()):
        raise ValueError(f"no step would take any time: give at least one of {', '.join(_TERMS)} a duration above 0")
    return StepCostModel.of([seconds.get(name, 0.0) for name in _TERMS])
