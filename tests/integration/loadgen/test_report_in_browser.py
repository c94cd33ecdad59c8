"""The report page in a real browser: no console errors, no empty figures, working tooltips and legends, text
that covers nothing, and colours with enough contrast, on wide and narrow screens, light and dark.

Skipped without Chromium.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadgen.report.write import views_of, write_report
from tests.browser import BROWSER, FLAGS
from tests.loadgen_synthetic import warm, write_result

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

needs_browser = pytest.mark.skipif(BROWSER is None, reason="browser: no Chromium on the PATH")
LONG = "label_without_spaces_" * 6
PROBE = Path(__file__).with_name("report_probe.js")


def loaded(path: Path, profile: Path, width: int = 1280, *, is_dark: bool = False) -> tuple[str, list[str]]:
    """Return the page's DOM after its scripts have run, and its console messages."""
    flags = [*FLAGS, f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
    flags += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", f"--window-size={width},2000"]
    command = [str(BROWSER), *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def probed(page: Path, extra: str = "", name: str = "probed.html") -> Path:
    """Return a copy of the page with all parts open, that reports its problems in `data-problems`."""
    copy = page.with_name(name)
    text = page.read_text().replace("<details", "<details open")
    copy.write_text(text.replace("</body>", f"{extra}<script>{PROBE.read_text()}</script></body>"))
    return copy


def reported(dom: str) -> dict[str, str]:
    """Return what the probe found: problems, and facts about the page."""
    return dict(re.findall(r'data-(problems|drawn|width|scheme|texts)="([^"]*)"', dom[dom.index("<body") :][:20_000]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")

    def page(name: str, *results: Path) -> Path:
        return probed(write_report(views_of(results), root / name)[0])

    def result(name: str, **changes: Any) -> Path:
        return write_result(root / f"run {name}", **{"rate": 4.0, "seconds": 12.0, **changes})

    late = result("late", lag_s=0.02)
    return {
        "one": page("one", result("slow", rate=8.0, speed=0.5, sheds=False)),
        "two": page("two", result("a", timeline=False, label=LONG), warm(result("b"))),
        "twenty": page("twenty", late, *(result(f"n{i}", rate=1.0 + i, seconds=4.0) for i in range(19))),
    }


@needs_browser
@pytest.mark.parametrize(
    ("name", "width", "is_dark"),
    [
        pytest.param("one", 1280, False, marks=pytest.mark.long),
        ("one", 500, True),
        pytest.param("two", 500, False, marks=pytest.mark.long),
        ("two", 1280, True),
        ("twenty", 500, False),
    ],
)
def test_page_is_drawn_without_console_errors_and_legible(
    pages: dict[str, Path], name: str, width: int, is_dark: bool, tmp_path: Path
) -> None:
    dom, console = loaded(pages[name], tmp_path / "profile", width, is_dark=is_dark)
    assert console == []
    found = reported(dom)
    assert found["problems"] == ""
    assert int(found["drawn"]) == pages[name].read_text().count("<figure ")
    assert (found["width"], found["scheme"]) == (str(width), "dark" if is_dark else "light")
    assert int(found["texts"]) > 100


@needs_browser
def test_probe_detects_each_problem(pages: dict[str, Path], tmp_path: Path) -> None:
    """The same page, damaged: each damage is found."""
    damage = """<script>
    document.querySelector(".headline").style.color = "#eee";
    document.querySelector("main").style.width = "700px";
    const svg = document.querySelector('[data-figure="attainment-ttft"] svg');
    const line = svg.querySelector("path.line"), at = line.getPointAtLength(line.getTotalLength() / 2);
    const [tick, label] = svg.querySelectorAll("text");
    tick.setAttribute("x", at.x); tick.setAttribute("y", at.y + 4);
    const other = label.cloneNode(true); other.textContent = "twice"; label.after(other);
    </script>"""
    page = probed(pages["one"].with_name("report.html"), damage, "damaged.html")
    dom, console = loaded(page, tmp_path / "profile", 500)
    assert console == []
    problems = reported(dom)["problems"]
    for problem in ("contrast", "page scrolls", "on a curve", "overlaps"):
        assert problem in problems


@needs_browser
def test_console_errors_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<!DOCTYPE html><title>x</title><script>nonsense()</script>")
    _, console = loaded(page, tmp_path / "profile")
    assert "nonsense is not defined" in console[0]
