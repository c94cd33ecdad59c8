import pytest

from baton.core.step_cost import StepCostModel
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.config.worker_settings import parse_step_costs


def costs(**seconds: float) -> StepCostModel:
    none = dict.fromkeys(("step_s", "prefill_token_s", "prefill_attended_s", "decode_seq_s", "decode_context_s"), 0.0)
    return StepCostModel(**{**none, **seconds})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step=4ms", costs(step_s=0.004)),
        (" decode_seq = 0.5 ms , step=1s,", costs(step_s=1.0, decode_seq_s=0.0005)),
        ("prefill_token=50us,prefill_attended=2ns", costs(prefill_token_s=50e-6, prefill_attended_s=2e-9)),
        ("decode_context=1e1µs", costs(decode_context_s=1e-5)),
    ],
)
def test_step_costs_are_parsed(text: str, expected: StepCostModel) -> None:
    assert parse_step_costs(text).coefficients == pytest.approx(expected.coefficients)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "every step would take no time"),
        ("step=0ms", "every step would take no time"),
        ("4ms", "expected TERM=DURATION with a term of step, prefill_token, .*got '4ms'"),
        ("steps=4ms", "got 'steps=4ms'"),
        ("step=4ms,step=5ms", "step is given twice"),
        ("step=4", "step: expected a duration such as 4ms, 50us or 2ns, got '4'"),
        ("step=4min", "step: expected a duration"),
        ("step=-4ms", "step: expected a duration"),
        ("decode_seq=", "decode_seq: expected a duration"),
        ("step=1e999s", "step: 1e999s is not a finite duration"),
    ],
)
def test_invalid_step_costs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_step_costs(text)


def test_default_step_costs_are_usable() -> None:
    assert parse_step_costs(WorkerConfig().emulated_costs).is_usable
