"""Distributions of lengths and times, and their text forms."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.draws import stream
from loadgen.plan.lengths import (
    Empirical,
    Exponential,
    Fixed,
    Lognormal,
    Uniform,
    draw_lengths,
    parse_lengths,
    parse_times,
)


def drawn(text: str, count: int = 100_000) -> np.ndarray:
    return draw_lengths(parse_lengths(text), stream(1, text), count)


def test_fixed_distribution_returns_its_length() -> None:
    assert set(drawn("512", 100).tolist()) == {512}


def test_uniform_includes_both_ends_equally() -> None:
    values, counts = np.unique(drawn("uniform:3-7"), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert counts == pytest.approx(20_000, rel=0.03)


def test_lognormal_has_its_mean_and_cv() -> None:
    values = drawn("lognormal:mean=512,cv=0.8", 400_000)
    assert values.mean() == pytest.approx(512, rel=0.006)
    assert values.std() / values.mean() == pytest.approx(0.8, rel=0.02)
    assert np.median(values) == pytest.approx(512 / math.sqrt(1 + 0.64), rel=0.01)


def test_values_outside_are_moved_to_the_bounds() -> None:
    values = drawn("lognormal:mean=512,cv=0.8,min=300,max=600")
    assert (values.min(), values.max()) == (300, 600)
    free = drawn("lognormal:mean=512,cv=0.8")
    assert (values == 600).mean() == pytest.approx((free >= 600).mean(), abs=0.01)


def test_exponential_has_its_mean() -> None:
    values = parse_times("exponential:mean=5s,max=1m").draw(stream(1, "e"), 200_000)
    assert values.mean() == pytest.approx(5, rel=0.01)
    assert values.max() <= 60


def test_lengths_are_at_least_one() -> None:
    assert drawn("exponential:mean=1").min() == 1


def test_times_have_units_and_fractions() -> None:
    assert parse_times("300ms") == Fixed(0.3)
    assert parse_times("2m") == Fixed(120)
    assert parse_times("uniform:1s-1500ms") == Uniform(1.0, 1.5, is_integer=False)
    assert parse_times("lognormal:mean=5s,cv=1,max=2m") == Lognormal(mean=5, cv=1, high=120)
    between = parse_times("uniform:1s-1500ms").draw(stream(0, "u"), 1000)
    assert between.min() >= 1
    assert between.max() <= 1.5
    assert len(set(between.tolist())) > 900


@pytest.mark.parametrize("text", ["512", "uniform:1-100", "lognormal:mean=512,cv=0.8", "exponential:mean=50"])
def test_more_draws_start_like_fewer(text: str) -> None:
    assert drawn(text, 5000)[:100].tolist() == drawn(text, 100).tolist()


def test_lengths_are_read_from_a_csv_column(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text('TIMESTAMP,ContextTokens,"GeneratedTokens"\n2023,100,1\n2024,"300",2\n')
    assert parse_lengths(f"file:{path}:ContextTokens") == Empirical((100.0, 300.0))
    values, counts = np.unique(drawn(f"file:{path}:GeneratedTokens"), return_counts=True)
    assert values.tolist() == [1, 2]
    assert counts == pytest.approx(50_000, rel=0.03)


def test_lengths_are_read_from_a_key_of_gzipped_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"input_length": 7}\n{"input_length": 9}\n'))
    assert parse_lengths(f"file:{path}:input_length") == Empirical((7.0, 9.0))


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        ("a,b\n1,2\n", "c", "x.csv:1: no column `c`; the columns are a, b"),
        ("a,b\n1,2\n3\n", "b", "x.csv:3: no `b` in `3`"),
        ("a,b\n1,two\n", "b", "x.csv:2: `two` is not a number of 0 or more"),
        ("a,b\n", "b", "x.csv: the file has no rows"),
        ('{"a": 1}\n{"b": 1}\n', "a", "x.csv:2: no `a` in"),
        ('{"a": 1}\n{"a": \n', "a", "x.csv:2: no `a` in"),
    ],
)
def test_invalid_columns_are_rejected(tmp_path: Path, content: str, column: str, message: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(BadPlan) as caught:
        parse_lengths(f"file:{tmp_path}/x.csv:{column}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "`` is not a distribution; write 512, uniform:100-800"),
        ("0", "`0`: a length must be an integer of 1 or more"),
        ("1.5", "`1.5`: a length must be an integer"),
        ("-5", "`-5` is not a distribution"),
        ("512:1", "`512:1` is not a distribution"),
        ("normal:mean=5", "`normal:mean=5` is not a distribution"),
        ("uniform:5", "`uniform:5`: write two numbers, such as 100-800"),
        ("uniform:8-5", "`uniform:8-5`: the first number must not be larger than the second"),
        ("uniform:0-5", "`uniform:0-5`: the bounds must be integers of 1 or more"),
        ("lognormal:mean=5", "`lognormal:mean=5`: `cv=…` is missing"),
        ("lognormal:mean=0,cv=1", "the mean must be above 0"),
        ("lognormal:mean=5,cv=1,cv=2", "contains `cv` twice"),
        ("lognormal:mean=5,cv=1,sd=2", "`sd=2` is not a known setting; write mean=…, cv=…, min=…, max=…"),
        ("lognormal:mean=5,cv=1,min=9,max=3", "`min` must not be above `max`"),
        ("exponential:mean=5,cv=1", "`cv=1` is not a known setting"),
        ("file:x", "`file:x`: write file:PATH:COLUMN"),
    ],
)
def test_invalid_distributions_are_rejected(text: str, message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        parse_lengths(text)
    assert message in str(caught.value)


def test_distributions_can_be_constructed_directly() -> None:
    assert parse_lengths("lognormal:mean=512,cv=0.8,min=16,max=4096") == Lognormal(mean=512, cv=0.8, low=16, high=4096)
    assert parse_lengths("exponential:mean=512") == Exponential(mean=512)
    assert parse_lengths("uniform:1-2") == Uniform(1, 2)
