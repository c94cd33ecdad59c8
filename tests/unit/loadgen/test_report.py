"""The report of a synthetic run: self-contained, with its own data, and figures drawn from that data."""

import csv
import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from loadgen.commands.report_command import command
from loadgen.loadgen_errors import BadRecords, LoadgenError
from loadgen.measure.records import Record
from loadgen.measure.records_file import RecordWriter, write_run
from loadgen.measure.request_metrics import RequestOutcome
from loadgen.report.critical_path import STAGES
from loadgen.report.drawing.figures import attainment_by_rate, goodput_by_rate
from loadgen.report.report_json import schema
from loadgen.report.write import views_of, write_report
from loadgen.slo_target import BadSlo, SloTarget
from tests.loadgen_builders import record, refused, run
from tests.loadgen_report_page import Drawing, Page, points_of, spans_of, tolerance
from tests.loadgen_synthetic import warm, write_result


@dataclass(frozen=True)
class Written:
    """The four files of a report."""

    directory: Path
    data: dict[str, Any]
    html: str

    @property
    def page(self) -> Page:
        return Page(self.html)

    @classmethod
    def of(cls, results: list[Path], directory: Path, **changes: Any) -> "Written":
        write_report(views_of(results, **changes), directory, "0.1.0")
        return cls(
            directory=directory,
            data=json.loads((directory / "report.json").read_text()),
            html=(directory / "report.html").read_text(),
        )


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Written:
    result = write_result(tmp_path_factory.mktemp("one") / "result", rate=10, seconds=15, label="one worker")
    return Written.of([result], result)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Two systems at two rates. The generator of the last run was late."""
    root = tmp_path_factory.mktemp("several")
    results = [write_result(root / f"a{rate}", rate=rate, seconds=6, label="A") for rate in (4, 8)]
    results.append(write_result(root / "b4", rate=4, seconds=6, label="B", timeline=False, sheds=False))
    results.append(write_result(root / "b8", rate=8, seconds=6, label="B", timeline=False, sheds=False, lag_s=0.005))
    return Written.of(results, root / "report")


def small(directory: Path, *records: Record, **changes: Any) -> Path:
    directory.mkdir()
    with RecordWriter(directory / "records.jsonl") as writer:
        for one in records:
            writer.write(one)
    write_run(directory, run(num_offered=len(records), **changes))
    return directory


@pytest.mark.parametrize("name", ["single", "several"])
def test_json_matches_its_schema(name: str, request: pytest.FixtureRequest) -> None:
    written: Written = request.getfixturevalue(name)
    rules = json.loads(schema())
    jsonschema.Draft202012Validator.check_schema(rules)
    jsonschema.validate(written.data, rules, cls=jsonschema.Draft202012Validator)
    text = (written.directory / "report.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_schema_rejects_invalid_reports(single: Written) -> None:
    rules = jsonschema.Draft202012Validator(json.loads(schema()))
    data = single.data | {"figures": []}
    assert rules.is_valid(data)
    for damage in ({"loadgen_report": 2}, {"runs": []}, {"surprise": 1}):
        assert not rules.is_valid(data | damage)
    for key, value in (("outcomes", {"good": 1}), ("offered", -1), ("valid", None), ("surprise", 1)):
        assert not rules.is_valid(data | {"runs": [data["runs"][0] | {key: value}]})


@pytest.mark.parametrize("name", ["single", "several"])
def test_page_is_self_contained(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name).page
    assert [reference for reference in page.references if not reference.startswith("data:,")] == []
    assert not {"iframe", "img", "object", "embed", "base", "video", "audio", "source", "image", "use"} & set(page.tags)
    for text in (*page.styles, *page.scripts):
        assert not re.search(
            r"url\(|@import|@font-face|fetch\(|XMLHttpRequest|import\(|WebSocket|EventSource|sendBeacon|\.src\b", text
        )
    assert all("://" not in text for text in page.styles)


@pytest.mark.parametrize("name", ["single", "several"])
def test_page_contains_the_json(name: str, request: pytest.FixtureRequest) -> None:
    written: Written = request.getfixturevalue(name)
    assert written.page.data == written.data


@pytest.mark.parametrize("name", ["single", "several"])
def test_every_figure_is_drawn_from_the_json(name: str, request: pytest.FixtureRequest) -> None:
    written: Written = request.getfixturevalue(name)
    drawn = written.page.figures
    assert sorted(drawn) == sorted(figure["id"] for figure in written.data["figures"])
    for figure in written.data["figures"]:
        assert len(drawn[figure["id"]]) == (2 if figure["is_wide"] else 1), "also one for narrow screens"
        for drawing in drawn[figure["id"]]:
            is_drawn_from_the_json(figure, drawing)


def is_drawn_from_the_json(figure: dict[str, Any], drawing: Drawing) -> None:
    rows = figure["series"] if figure["kind"] == "lines" else figure["rows"]
    assert len(drawing.groups) == len(rows) > 0, figure["id"]
    for number, row in enumerate(rows):
        if figure["kind"] == "lines":
            seen = points_of(drawing, number)
            expected = [(x, y) for x, y in row["points"]]
            axes = (figure["x"], figure["y"])
        else:
            seen = spans_of(drawing, number)
            expected = [(span["from"], span["to"]) for span in row["spans"]]
            axes = (figure["x"], figure["x"])
        assert len(seen) == len(expected) > 0, (figure["id"], number)
        for here, there in zip(seen, expected, strict=True):
            for axis, value, run_data in zip(axes, here, there, strict=True):
                assert abs(value - run_data) <= tolerance(axis, run_data), (figure["id"], row["name"], here, there)


def test_curves_end_at_the_share_of_complete_responses(single: Written) -> None:
    (run_data,) = single.data["runs"]
    figures = {figure["id"]: figure for figure in single.data["figures"]}
    num_complete = run_data["outcomes"]["good"] + run_data["outcomes"]["late"]
    assert figures["attainment-ttft"]["series"][0]["points"][-1][1] == pytest.approx(num_complete / run_data["offered"])
    assert figures["cdf-itl"]["series"][0]["points"][-1][1] == 1.0
    at_one = [y for x, y in figures["attainment-scale"]["series"][0]["points"] if x <= 1]
    assert at_one[-1] <= run_data["attainment"]["joint"]["share"]
    assert sum(run_data["outcomes"].values()) == run_data["offered"]


def test_critical_path_sums_to_the_mean_e2e(single: Written) -> None:
    (run_data,) = single.data["runs"]
    assert sum(run_data["critical_path_ms"].values()) == pytest.approx(
        run_data["latency"]["e2e"]["mean_ms"]["value"], rel=1e-6
    )
    assert list(run_data["critical_path_ms"]) == [
        stage for stage in STAGES if stage not in ("to the first token", "no complete response")
    ]


def test_predictions_are_compared_with_server_measurements(single: Written) -> None:
    """The synthetic server predicts a TTFT that is 10 % too long, from the placement on."""
    (run_data,) = single.data["runs"]
    num_complete = run_data["outcomes"]["good"] + run_data["outcomes"]["late"]
    ttft, tpot = run_data["predicted_to_actual_ttft"], run_data["predicted_to_actual_tpot"]
    assert (ttft["requests"], ttft["p10"], ttft["p50"], ttft["p90"]) == (num_complete, *[pytest.approx(1.1)] * 3)
    assert 0 < tpot["p10"] < tpot["p50"] < tpot["p90"]
    assert 0 < tpot["requests"] <= num_complete
    row = next(row for row in csv.DictReader((single.directory / "requests.csv").open()) if row["predicted_ttft_ms"])
    assert float(row["predicted_ttft_ms"]) == pytest.approx(1.1 * float(row["placed_ttft_ms"]), rel=1e-6)
    summary = (single.directory / "report.md").read_text()
    assert f"Predicted / actual ttft: p50 1.1, p90 1.1 of {num_complete} requests." in summary
    assert "predicted / actual tpot: p10, p50, p90" in single.html


def test_predictions_are_none_without_data(several: Written) -> None:
    without = several.data["runs"][2]
    assert (without["predicted_to_actual_ttft"], without["predicted_to_actual_tpot"]) == (None, None)


def test_prompt_token_deviation_is_reported(tmp_path: Path) -> None:
    counted = [record(index, planned_prompt_tokens=100, num_prompt_tokens=105) for index in range(4)]
    written = Written.of([small(tmp_path / "r", *counted, refused(4, planned_prompt_tokens=100))], tmp_path / "out")
    (run_data,) = written.data["runs"]
    assert run_data["prompts"] == {
        "planned_tokens": 400,
        "counted_tokens": 420,
        "requests": 4,
        "deviation": pytest.approx(0.05),
    }
    assert "420 (+5.00%)" in written.html
    assert "counted 420 tokens, +5.00% relative to the plan" in (tmp_path / "out" / "report.md").read_text()


def test_prefix_hits_are_compared_with_the_best_possible(single: Written) -> None:
    hits = single.data["runs"][0]["prefix_hits"]
    infinite, lru = hits["best"].values()
    assert 0 < hits["achieved"] <= infinite < 1
    assert lru <= infinite
    assert sum(hits["by_tier"].values()) == hits["cached_tokens"]


def test_groups_sum_to_all_requests(single: Written) -> None:
    (run_data,) = single.data["runs"]
    for key in ("by_class", "by_tenant", "by_endpoint"):
        assert sum(group["offered"] for group in run_data[key]) == run_data["offered"]
        assert sum(group["goodput_rps"] for group in run_data[key]) == pytest.approx(run_data["goodput_rps"]["value"])
    assert {worker["role"] for worker in run_data["by_worker"]} == {"prefill", "decode"}
    assert run_data["goodput_rps_per_worker"] == pytest.approx(run_data["goodput_rps"]["value"] / 3)


def test_invalid_run_is_marked_in_every_format(several: Written, single: Written) -> None:
    assert several.page.alerts == 1
    assert single.page.alerts == 0
    assert [one["valid"] for one in several.data["runs"]] == [True, True, True, False]
    goodput = next(figure for figure in several.data["figures"] if figure["id"] == "goodput-rate")
    assert [series["classes"] for series in goodput["series"][:2]] == [["", ""], ["", "invalid"]]
    summary = (several.directory / "report.md").read_text()
    assert "INVALID RUN" in summary
    assert "p99 send lag" in summary
    assert "INVALID" not in (single.directory / "report.md").read_text()
    rows = list(csv.DictReader((several.directory / "requests.csv").open()))
    invalid = next(one for one in several.data["runs"] if not one["valid"])
    assert {row["run"] for row in rows if row["valid"] == "no"} == {invalid["name"]}
    assert sum(row["valid"] == "no" for row in rows) == invalid["offered"]


def test_figures_show_nothing_twice(single: Written, several: Written, tmp_path: Path) -> None:
    one = {figure["id"] for figure in single.data["figures"]}
    assert {name for name in one if name.startswith("cdf-")} == {"cdf-itl"}
    assert not {"attainment-rate", "goodput-rate"} & one
    assert {"attainment-rate", "goodput-rate"} <= {figure["id"] for figure in several.data["figures"]}
    same_rate = [write_result(tmp_path / name, rate=4, seconds=4, label=name) for name in ("a", "b")]
    both = Written.of(same_rate, tmp_path / "both")
    assert not {"attainment-rate", "goodput-rate"} & {figure["id"] for figure in both.data["figures"]}
    sent = [series["name"] for figure in both.data["figures"] for series in figure.get("series", [])]
    assert not [name for name in sent if "actual send" in name], "the same curve, because sending was in time"


def test_page_opens_with_the_sentence(single: Written, several: Written) -> None:
    for written in (single, several):
        sentence = escape(written.data["headline"])
        assert f'</header>\n<p class="headline">{sentence}</p>' in written.html
        assert written.data["headline"].split(";")[0] in (written.directory / "report.md").read_text()


def test_configuration_has_no_keys_and_no_python(single: Written) -> None:
    box = single.html[single.html.index("<h2>Configuration") :].partition("</section>")[0]
    cells = re.findall(r"<td>(.*?)</td>", box)
    assert "KV cache" in cells
    assert "60,000 tokens" in cells
    assert not [cell for cell in cells if re.search(r"[{}_]|None|True|False", cell)]


def test_warm_cache_is_marked_in_every_format(tmp_path: Path) -> None:
    warm_run = warm(write_result(tmp_path / "warm", rate=5, seconds=6))
    written = Written.of([warm_run], warm_run)
    jsonschema.validate(written.data, json.loads(schema()), cls=jsonschema.Draft202012Validator)
    (run_data,) = written.data["runs"]
    assert (run_data["valid"], run_data["verdict"], run_data["warm_cache"]["state"]) == (True, "warm", "warm")
    hits = run_data["warm_cache"]
    assert hits["hit_tokens"] > hits["allowed_tokens"] > 0
    assert 'class="verdict warm" role="alert"><b>WARM CACHE</b>' in written.html
    assert "Valid run" not in written.html, "one box for both"
    assert "**Warm cache: " in (warm_run / "report.md").read_text()
    found = CliRunner().invoke(command, [str(warm_run)])
    assert "warm cache: " in found.output
    cold = write_result(tmp_path / "cold", rate=5, seconds=6)
    both = Written.of([warm_run, cold], tmp_path / "both")
    assert [one["verdict"] for one in both.data["runs"]] == ["warm", "valid"]
    rows = list(csv.DictReader((tmp_path / "both" / "requests.csv").open()))
    assert {(row["run"], row["warm_cache"]) for row in rows} == {("warm", "yes"), ("cold", "no")}
    assert '<span class="warm-text">WARM CACHE</span>' in both.html
    assert "**WARM CACHE**" in (tmp_path / "both" / "report.md").read_text()


def test_invalid_run_with_a_warm_cache_says_both_in_one_box(tmp_path: Path) -> None:
    result = warm(write_result(tmp_path / "r", rate=5, seconds=6, lag_s=0.01))
    written = Written.of([result], result)
    (run_data,) = written.data["runs"]
    assert (run_data["verdict"], written.page.alerts) == ("invalid", 1)
    box = written.html[written.html.index("INVALID RUN") :].partition("</div>")[0]
    assert "warm cache: " in box
    assert run_data["remedies"][0] in box
    assert f"Change: {run_data['remedies'][0]}" in (result / "report.md").read_text()


def test_unknown_cache_is_noted_once(tmp_path: Path) -> None:
    result = small(tmp_path / "r", record(0, num_cached_tokens=None))
    written = Written.of([result], result)
    assert written.data["runs"][0]["warm_cache"]["state"] == "unknown"
    html = re.sub(r"<script.*?</script>", "", written.html, flags=re.DOTALL).lower()
    assert html.count("not known whether the cache was warm") == 1
    assert (result / "report.md").read_text().lower().count("not known whether the cache was warm") == 1


def test_csv_has_every_request(single: Written) -> None:
    rows = list(csv.DictReader((single.directory / "requests.csv").open()))
    (run_data,) = single.data["runs"]
    assert len(rows) == run_data["offered"]
    counts = {str(outcome): sum(row["outcome"] == outcome for row in rows) for outcome in RequestOutcome}
    assert counts == run_data["outcomes"]
    ttfts = [float(row["ttft_ms"]) for row in rows if row["outcome"] in ("good", "late")]
    assert sum(ttfts) / len(ttfts) == pytest.approx(run_data["latency"]["ttft"]["mean_ms"]["value"], rel=1e-5)


def test_texts_with_markup_are_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    one = refused(0, error=f"=HYPERLINK(1) {evil}", status=500, tenant=evil, reason="a|b`c")
    written = Written.of([small(tmp_path / "r", one, record(1), model=evil, flags={"label": evil})], tmp_path / "out")
    page = written.page
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert page.data["runs"][0]["model"] == evil
    (row, _) = csv.DictReader((tmp_path / "out" / "requests.csv").open())
    assert row["error"].startswith("'=")
    assert "<script" not in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    "records",
    [
        [refused(0)],
        [record(0)],
        [record(0, tokens=(1.5,)), record(1, tokens=(1.5,))],
        [
            refused(i, status=None, reason="", sent_s=None, error="connection refused", intended_s=float(i))
            for i in range(5)
        ],
        [record(i, intended_s=1.0) for i in range(5)],
        [record(i, tokens=((1.5, 3),), num_prompt_tokens=None, num_cached_tokens=None) for i in range(3)],
    ],
    ids=["refused", "one", "one-token", "unreachable", "all at once", "one message"],
)
def test_runs_without_responses_have_a_report(tmp_path: Path, records: list[Record]) -> None:
    written = Written.of([small(tmp_path / "r", *records)], tmp_path / "out")
    jsonschema.validate(written.data, json.loads(schema()))
    assert sum(written.data["runs"][0]["outcomes"].values()) == len(records)
    assert written.page.data == written.data
    for figure in written.data["figures"]:
        spans = [span for row in figure.get("rows", []) for span in row["spans"]]
        assert figure["kind"] == "lines" or any(span["to"] > span["from"] for span in spans), (
            f"{figure['id']} would be empty"
        )


def test_slo_option_reevaluates_the_records(tmp_path: Path) -> None:
    result = small(tmp_path / "r", record(0), record(1))
    found = CliRunner().invoke(command, [str(result), "--slo", "ttft=1ms", "--workers", "4"])
    assert found.exit_code == 0, found.output
    data = json.loads((result / "report.json").read_text())["runs"][0]
    assert data["outcomes"]["late"] == 2
    assert data["slos"] == {"default": {"ttft_ms": 1.0}}
    assert data["workers"] == 4
    assert "2 late = 2 offered; SLO attainment 0 %" in found.output


def test_slo_of_one_class_keeps_the_others(tmp_path: Path) -> None:
    result = write_result(tmp_path / "r", rate=4, seconds=4)
    found = CliRunner().invoke(command, [str(result), "--slo", "batch:ttft=9s"])
    assert found.exit_code == 0, found.output
    (run_data,) = json.loads((result / "report.json").read_text())["runs"]
    assert run_data["slos"] == {"interactive": {"ttft_ms": 500.0, "tpot_ms": 50.0}, "batch": {"ttft_ms": 9000.0}}
    with pytest.raises(BadSlo, match="no class `bacth`; its classes are interactive, batch"):
        views_of([result], slos=[("bacth", SloTarget(ttft_s=9))])


def test_kv_tokens_option_gives_the_best_prefix_hits(tmp_path: Path) -> None:
    result = write_result(tmp_path / "r", rate=4, seconds=4)
    found = CliRunner().invoke(command, [str(result), "--kv-tokens", "1000000"])
    assert found.exit_code == 0, found.output
    (run_data,) = json.loads((result / "report.json").read_text())["runs"]
    best = run_data["prefix_hits"]["best"]
    assert best["plan's best, LRU of 1,000,000 tokens"] == best["plan's best, infinite cache"], "all of it fits"
    assert len(best) == 2


def test_several_results_share_one_report(tmp_path: Path) -> None:
    results = [small(tmp_path / name, record(0), flags={"label": "same"}) for name in ("x", "y")]
    found = CliRunner().invoke(command, [*map(str, results)])
    assert found.exit_code == 0, found.output
    names = [one["name"] for one in json.loads((tmp_path / "report.json").read_text())["runs"]]
    assert names == ["same · x", "same · y"]


def test_incomplete_record_is_noted(tmp_path: Path) -> None:
    result = small(tmp_path / "r", record(0), record(1))
    (result / "records.jsonl").write_bytes((result / "records.jsonl").read_bytes()[:-20])
    written = Written.of([result], tmp_path / "out")
    (run_data,) = written.data["runs"]
    assert "incomplete" in run_data["notes"][0]
    assert "1 of 2 offered requests have no record; the run was probably killed" in run_data["invalid"]
    assert "incomplete" in written.html


def test_result_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRecords, match="there is nothing to report"):
        views_of([small(tmp_path / "r")])


def test_results_in_different_directories_need_out(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    results = [str(small(tmp_path / name / "r", record(0))) for name in ("x", "y")]
    found = CliRunner().invoke(command, results)
    assert found.exit_code == 2
    assert "--out" in found.output
    assert not list(tmp_path.glob("report.*"))
    assert CliRunner().invoke(command, [*results, "--out", str(tmp_path / "z")]).exit_code == 0


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    result = small(tmp_path / "r", record(0))
    (tmp_path / "file").touch()
    with pytest.raises(LoadgenError, match=r"file/out cannot be written .*--out"):
        write_report(views_of([result]), tmp_path / "file" / "out")


def test_runs_that_ended_early_are_marked_in_rate_figures(tmp_path: Path) -> None:
    """Their requests in flight count as missed, although they could have met the SLO."""
    records = [record(i, tokens=(i + 0.1, i + 0.2), intended_s=float(i), sent_s=float(i)) for i in range(3)]
    results = [
        small(tmp_path / name, *records, interrupted=name == "y", flags={"label": "same"}) for name in ("x", "y")
    ]
    for figure in (goodput_by_rate, attainment_by_rate):
        (points, *_) = figure(views_of(results))["series"]
        assert points["classes"] == ["", "early"]
        assert ["ended early" in name for name in points["names"]] == [False, True]
