"""The report page in a real browser: no console errors, no empty figures, working tooltips and legends.

Skipped without Chromium.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from loadgen.report.write import views_of, write_report
from tests.loadgen_synthetic import write_result

pytestmark = pytest.mark.integration

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)
PROBE = """
<script>
const told = [];
for (const figure of document.querySelectorAll("figure[data-figure]")) {
  const svg = figure.querySelector("svg");
  const boxes = [...svg.querySelectorAll(".series, .line-row")].map((part) => part.getBBox());
  const size = boxes.reduce((sum, box) => sum + box.width, 0);
  const box = svg.getBoundingClientRect();
  if (!(size > 1 && box.width > 100 && box.height > 20)) told.push("empty " + figure.dataset.figure);
  const at = { clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.5, bubbles: true };
  (svg.querySelector("[data-tip]") || svg).dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.querySelector(".tip");
  if (!tip.classList.contains("on") || !tip.textContent) told.push("no tip " + figure.dataset.figure);
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  const key = figure.querySelector(".key");
  if (key) {
    key.click();
    if (!svg.querySelector(".is-off")) told.push("legend " + figure.dataset.figure);
    key.click();
  }
}
document.body.dataset.told = told.join("; ") || "all drawn: " + document.querySelectorAll("figure").length;
</script>
"""


def loaded(path: Path, profile: Path) -> tuple[str, list[str]]:
    """Return the page's DOM after its scripts have run, and its console messages."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ]
    flags += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", "--window-size=1280,2000", "--dump-dom"]
    done = subprocess.run([str(BROWSER), *flags, path.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.mark.skipif(BROWSER is None, reason="browser: no Chromium on the PATH")
@pytest.mark.parametrize("count", [1, 3])
def test_page_loads_without_console_errors_and_draws_every_figure(count: int, tmp_path: Path) -> None:
    results = [write_result(tmp_path / f"run{i}", rate=4.0 + i, seconds=12, timeline=i != 1) for i in range(count)]
    page = write_report(views_of(results), tmp_path / "out")[0]
    text = page.read_text().replace("<details", "<details open")
    page.write_text(text.replace("</body>", f"{PROBE}</body>"))
    dom, console = loaded(page, tmp_path / "profile")
    assert console == []
    (problems,) = re.findall(r'data-told="([^"]*)"', dom)
    assert problems == f"all drawn: {text.count('<figure ')}"


@pytest.mark.skipif(BROWSER is None, reason="browser: no Chromium on the PATH")
def test_console_errors_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<!DOCTYPE html><title>x</title><script>nonsense()</script>")
    _, console = loaded(page, tmp_path / "profile")
    assert "nonsense is not defined" in console[0]
