"""Scales of an SLO: their text form, the bounds that they give, and errors."""

from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.slo_target import BadSlo, SloScale, SloTarget


@pytest.mark.parametrize(
    ("text", "scaled"),
    [("2", "ttft=200ms,tpot=20ms"), ("3:6", "ttft=300ms,tpot=60ms"), ("0.5:1", "ttft=50ms,tpot=10ms")],
)
def test_scale_multiplies_each_bound_by_its_factor(text: str, scaled: str) -> None:
    scale = SloScale.parse(text)
    assert str(scale) == text
    assert str(scale.of(SloTarget.parse("ttft=100ms,tpot=10ms"))) == scaled


def test_one_factor_scales_the_whole_response_too() -> None:
    assert SloScale.parse("2").of(SloTarget.parse("e2e=1s")) == SloTarget.parse("e2e=2s")


@pytest.mark.parametrize("slo", ["", "tpot=50ms", "ttft=1s", "ttft=1s,tpot=50ms,e2e=2s"])
def test_two_factors_need_exactly_two_bounds(slo: str) -> None:
    with pytest.raises(BadSlo, match="needs an SLO with the bounds ttft and tpot, and no other"):
        SloScale.parse("2:3").of(SloTarget.parse(slo))


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1:0", "inf", "nan", "1:2:3", "3x6"])
def test_wrong_scale_is_refused(text: str) -> None:
    with pytest.raises(BadSlo, match="write a factor above zero, or TTFT:TPOT such as 3:6"):
        SloScale.parse(text)


def test_strictest_scale_has_the_smallest_factor_of_each_bound() -> None:
    scales = [SloScale.parse(text) for text in ("3:6", "10:3", "20:2")]
    assert SloScale.strictest(scales) == SloScale(3, 2)


@pytest.mark.parametrize(
    ("scale", "error"),
    [("1,3:6", "the scale 3:6 needs an SLO with the bounds ttft and tpot"), ("3:x", "`3:x` is not a scale")],
)
def test_capacity_refuses_a_wrong_scale_before_it_contacts_a_server(
    scale: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="2"):
        main(
            [
                "capacity",
                "--slo",
                "ttft=1s,e2e=2s",
                "--slo-scale",
                scale,
                "--url",
                "http://127.0.0.1:9",
                "--out",
                str(out),
            ]
        )
    assert error in capsys.readouterr().err
    assert not out.exists()
