"""The PromQL evaluator of the tests gives the results of cases in Prometheus's test suite.

Source: promql/promqltest/testdata.
"""

import math

import pytest

from tests.deploy.promql import Database, Unsupported, Vector
from tests.deploy.rule_cases import labels_of, values_of

REQUESTS = {
    'http_requests_total{path="/foo"}': "0+10x10",
    'http_requests_total{path="/bar"}': "0+18x5 0+18x5",
    'http_requests_total{path="/dings"}': "10+10x10",
    'http_requests_total{path="/bumms"}': "1+10x10",
}
RESETS = {'http_requests_total{path="/foo"}': "0 1 2 3 2 3 4"}
RESET_MIDDLE = {'total{path="/a"}': "0+27x4 0+27x5"}
RESET_END = {'total{path="/a"}': "0+10x9 0 10"}
OFFSET = {'total{path="/a"}': "0+10x10", 'total{path="/b"}': "0+20x10"}
ZERO_CUTOFF = {f'total{{path="{m}m"}}': f"{60 * m}+240x10" for m in range(6)}
HISTOGRAM = {
    'testhistogram_bucket{le="0.1", start="positive"}': "0+5x10",
    'testhistogram_bucket{le=".2", start="positive"}': "0+7x10",
    'testhistogram_bucket{le="1e0", start="positive"}': "0+11x10",
    'testhistogram_bucket{le="+Inf", start="positive"}': "0+12x10",
    'testhistogram_bucket{le="-.2", start="negative"}': "0+1x10",
    'testhistogram_bucket{le="-0.1", start="negative"}': "0+2x10",
    'testhistogram_bucket{le="0.3", start="negative"}': "0+2x10",
    'testhistogram_bucket{le="+Inf", start="negative"}': "0+3x10",
}
JOBS = {
    'requests{job="api", instance="0", group="production"}': "100x10",
    'requests{job="api", instance="1", group="production"}': "200x10",
    'requests{job="api", instance="0", group="canary"}': "300x10",
    'requests{job="app", instance="0", group="production"}': "500x10",
    'limit{job="api"}': "400x10",
    'info{instance="0", zone="a"}': "1x10",
    'info{instance="1", zone="b"}': "1x10",
}


def database(series: dict[str, str], interval_s: float = 300.0) -> Database:
    made = Database()
    for name, values in series.items():
        for index, value in enumerate(values_of(values)):
            assert not isinstance(value, str)
            made.add(labels_of(name), index * interval_s, value)
    return made


@pytest.mark.parametrize(
    ("series", "query", "at_s", "expected"),
    [
        (
            REQUESTS,
            "increase(http_requests_total[50m])",
            3000,
            {"/foo": 100, "/bar": 160, "/dings": 100, "/bumms": 100},
        ),
        (
            REQUESTS,
            "increase(http_requests_total[100m])",
            3000,
            {"/foo": 100, "/bar": 162, "/dings": 105, "/bumms": 101},
        ),
        (RESETS, "increase(http_requests_total[30m])", 1800, {"/foo": 7}),
        (RESET_MIDDLE, "rate(total[50m])", 3000, {"/a": 0.08}),
        (RESET_END, "rate(total[5m])", 3000, {}),
        (RESET_END, "rate(total[6m])", 3000, {"/a": 0}),
        (OFFSET, "rate(total[10m] offset 5m)", 3000, {"/a": 1 / 30, "/b": 1 / 15}),
        (REQUESTS, 'http_requests_total{path=~"/f.*"} offset 5m', 3000, {"/foo": 90}),
        (REQUESTS, 'http_requests_total{path!~"/[df].*"} > 100', 3000, {"/bumms": 101}),
        (REQUESTS, 'max_over_time(http_requests_total{path="/bar"}[50m])', 3000, {"/bar": 90}),
        (REQUESTS, '-http_requests_total{path="/bar"}', 3000, {"/bar": -72}),
    ],
)
def test_ranges(series: dict[str, str], query: str, at_s: float, expected: dict[str, float]) -> None:
    assert by_path(database(series).vector(query, at_s)) == pytest.approx(expected)


def test_extrapolation_stops_at_zero() -> None:
    made = database(ZERO_CUTOFF, interval_s=240)
    early = {"0m": 0.5, "1m": 0.55, "2m": 0.6, "3m": 0.6, "4m": 0.6, "5m": 0.6}
    assert by_path(made.vector("rate(total[20m])", 600)) == pytest.approx(early)
    assert by_path(made.vector("rate(total[20m])", 3000)) == pytest.approx({f"{m}m": 0.6 for m in range(6)})


def by_path(found: Vector) -> dict[str, float]:
    return {dict(labels)["path"]: value for labels, value in found.items()}


@pytest.mark.parametrize(
    ("quantile", "positive", "negative"),
    [(0, 0, -0.2), (0.2, 0.048, -0.2), (0.5, 0.15, -0.15), (0.8, 0.72, 0.3), (1, 1, 0.3)],
)
def test_quantiles(quantile: float, positive: float, negative: float) -> None:
    made = database(HISTOGRAM)
    for query in (
        f"histogram_quantile({quantile}, testhistogram_bucket)",
        f"histogram_quantile({quantile}, rate(testhistogram_bucket[10m]))",
    ):
        found = {dict(labels)["start"]: value for labels, value in made.vector(query, 3000).items()}
        assert found == pytest.approx({"positive": positive, "negative": negative}), query


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sum by (group) (requests)", {("group=production",): 800, ("group=canary",): 300}),
        ('sum(requests{job="api"})', {(): 600}),
        ("count without (instance, group) (requests)", {("job=api",): 3, ("job=app",): 1}),
        ("sum by (job) (requests) / on (job) limit", {("job=api",): 1.5}),
        ("max by (instance) (requests) * on (instance) info", {("instance=0",): 500, ("instance=1",): 200}),
        (
            'requests{group="canary"} * on (instance) group_left (zone) info',
            {("group=canary", "instance=0", "job=api", "zone=a"): 300},
        ),
        ("sum by (job) (requests) unless on (job) limit", {("job=app",): 500}),
        ("sum by (job) (requests) and on (job) limit", {("job=api",): 600}),
        ("sum by (job) (requests) > 550 or sum by (job) (requests)", {("job=api",): 600, ("job=app",): 500}),
        ("sum by (job) (requests) == bool 500", {("job=api",): 0, ("job=app",): 1}),
        ("1 - sum by (job) (requests) / 1000", {("job=api",): 0.4, ("job=app",): 0.5}),
    ],
)
def test_matching_and_grouping(query: str, expected: dict[tuple[str, ...], float]) -> None:
    found = database(JOBS).vector(query, 3000)
    assert {tuple(sorted(f"{k}={v}" for k, v in labels)): value for labels, value in found.items()} == pytest.approx(
        expected
    )


def test_old_and_ended_series_are_absent() -> None:
    made = database({"old": "1 2", "ended": "1 2 stale"}, interval_s=60)
    assert {dict(labels)["__name__"]: value for labels, value in made.vector('{__name__=~".+"}', 60).items()} == {
        "old": 2,
        "ended": 2,
    }
    assert [dict(labels)["__name__"] for labels in made.vector('{__name__=~".+"}', 120)] == ["old"]
    assert made.vector("old", 360) == {}
    assert list(made.vector("last_over_time(ended[10m])", 360).values()) == [2]


def test_ambiguous_match_is_an_error_and_zero_by_zero_is_nan() -> None:
    with pytest.raises(ValueError, match="many-to-many"):
        database(JOBS).vector("requests / on (job) requests", 3000)
    zero = database({"a": "0 0", "b": "0 0"}, interval_s=60)
    assert math.isnan(next(iter(zero.vector("a / b", 60).values())))


@pytest.mark.parametrize(
    "query",
    [
        "predict_linear(a[5m], 3)",
        "topk(3, a)",
        "sum_over_time(a[5m:1m])",
        "a @ 5",
        "label_replace(a, 'b', 'c', 'd', 'e')",
    ],
)
def test_unsupported_query_raises(query: str) -> None:
    with pytest.raises(Unsupported):
        database({"a": "1 2"}, interval_s=60).evaluate(query, 60)
