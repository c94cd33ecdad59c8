"""The live view's page in headless Chromium, with canned snapshots: drawing, pausing and reconnecting."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.browser import BROWSER, Browser, Page, chromium
from tests.integration.gateway.canned_view import NOW, CannedView, canned_view, point

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(BROWSER is None, reason="browser: no Chromium on the PATH"),
]

HYBRID = (("h0", "hybrid"), ("h1", "hybrid"))
THREE_ROLES = (("p0", "prefill"), ("p1", "prefill"), ("h0", "hybrid"), ("h1", "hybrid"), ("d0", "decode"))
PAIR = (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))
COLLISIONS = """(() => {
  const box = (element) => element.getBoundingClientRect();
  const nodes = [...document.querySelectorAll("#topology rect.box")].map(box);
  const covers = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const frame = box(document.getElementById("topology"));
  const isInside = (a) =>
    a.left >= frame.left && a.right <= frame.right && a.top >= frame.top && a.bottom <= frame.bottom;
  const drawn = [...document.querySelectorAll("#topology path, #topology rect.box, #topology .speed")];
  return {
    nodes: nodes.length,
    covered: nodes.filter((a, i) => nodes.some((b, j) => i < j && covers(a, b))).length,
    outside: drawn.filter((each) => !isInside(box(each))).length,
  };
})()"""
RECORD_PLOTS = """(() => {
  const Plain = uPlot;
  window.plots = [];
  window.uPlot = function (...values) { const plot = new Plain(...values); plots.push(plot); return plot; };
  const parse = JSON.parse;
  window.received = 0;
  JSON.parse = (...values) => { received += 1; return parse(...values); };
})()"""
FAST_TIMERS = "(() => { const begin = setTimeout; window.setTimeout = (run, ms) => begin(run, ms / 10); })()"
RECORD_RETRIES = """(() => {
  window.retries = new Set();
  const [begin, end] = [setTimeout, clearTimeout];
  window.setTimeout = (run, ms) => {
    const id = begin(() => { retries.delete(id); run(); }, ms);
    retries.add(id);
    return id;
  };
  window.clearTimeout = (id) => { retries.delete(id); end(id); };
})()"""
BARS = """Object.fromEntries([...document.querySelectorAll("#waterfall .bar-row")].map((row) => {
  const [left, width] = ["left", "width"].map((name) => parseFloat(row.querySelector(".bar").style[name]));
  return [row.querySelector(".name").textContent,
    [`${left.toFixed(1)} to ${(left + width).toFixed(1)}`, row.querySelector(".value").textContent]];
}))"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    empty = await browser.new_page()
    yield empty
    await empty.close()


async def opened(page: Page, view: CannedView, record: str = "0") -> None:
    await page.open(view.url)
    await page.until("document.body.dataset.shown > 0")
    await page.run(record)


async def hide(page: Page, is_hidden: bool) -> None:
    value = "true" if is_hidden else "false"
    await page.run(f"Object.defineProperty(document, 'hidden', {{ configurable: true, value: {value} }})")
    await page.run("void document.dispatchEvent(new Event('visibilitychange'))")


def open_request() -> dict[str, Any]:
    request = {"id": "ab" * 16, "phase": "decode", "age": 1.0, "prompt": 5, "cached": 0, "output": 2, "max_tokens": 9}
    return request | {"num_attempts": 1, "prefill": "p0", "decode": "d0", "ttft": None, "tpot": None, "met": None}


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(HYBRID, id="hybrid", marks=pytest.mark.long),
        pytest.param(PAIR, id="pair", marks=pytest.mark.long),
        pytest.param(THREE_ROLES, id="three-roles"),
    ],
)
async def test_nodes_do_not_cover_each_other_and_all_is_visible(page: Page, workers: Any) -> None:
    async with canned_view(*workers) as view:
        peer = {**view.base["links"][0], "owner": workers[-1][0], "reader": workers[-2][0], "inflight": 4096}
        view.send(links=[*view.base["links"], peer])
        for width in (1280, 1000, 900, 820, 768, 730, 700, 640, 500, 390):
            await page.resize(width)
            await opened(page, view)
            assert await page.run(COLLISIONS) == {"nodes": len(workers) + 1, "covered": 0, "outside": 0}, width
        assert page.problems == []


async def test_transfer_in_progress_stays_visible_when_the_page_grows(page: Page) -> None:
    async with canned_view(*PAIR) as view:
        await page.resize(1280)
        await opened(page, view)
        moving = "document.querySelectorAll('#topology .wire.moving').length"
        assert await page.run(moving) == 0
        height = "document.querySelector('main').clientHeight"
        before = await page.run(height)
        events = [{"number": i, "at": NOW, "severity": "info", "text": "w"} for i in range(40)]
        flow = {"from": "p0", "to": "d0", "prefilling": 1, "handoffs": 1, "bytes": 4096}
        view.send(flows=[flow], events=events)
        await page.until(height, lambda after: after > before)
        await page.run("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 200))")
        assert await page.run(moving) == 1


async def test_paused_page_stores_points_and_keeps_what_it_shows(page: Page) -> None:
    async with canned_view(*PAIR) as view:
        await opened(page, view, RECORD_PLOTS)
        await page.press("p")
        for step in range(1, 5):
            last = [point(NOW + 5 * (step - 1), ok=step - 1), point(NOW + 5 * step, ok=step)]
            view.send(model=f"model {step}", now=NOW + 5 * step, points=last)
        await page.until("received >= 4")
        await page.press("t")
        assert await page.run("plots[0].data[0].at(-1)") == NOW
        assert not (await page.run("document.getElementById('model').textContent")).startswith("model 4")
        await page.press("p")
        assert await page.run("plots[0].data[1].slice(-5)") == [0, 1, 2, 3, 4]
        assert (await page.run("document.getElementById('model').textContent")).startswith("model 4")


async def test_candidates_are_those_of_the_request_in_the_title(page: Page) -> None:
    async with canned_view(*PAIR) as view:
        await opened(page, view)
        record = {"attempt": 1, "placement": None, "rejection": None, "excluded": {}, "actuals": {}}
        record |= {"candidates": [], "columns": []}
        figures = view.base["figures"] | {"decisions": 2}
        for number, name in ((1, "aaaaaaaa"), (2, "bbbbbbbb")):
            view.send(figures=figures, why={"number": number, "id": name, "decisions": [{**record, "policy": name}]})
            await page.until_equal("document.getElementById('detail-title').textContent", f"Last decision: {name}")
            assert f"policy {name}" in await page.run("document.getElementById('decisions').textContent")


async def test_refused_page_says_why_and_comes_back(page: Page) -> None:
    await page.run_in_new_documents(FAST_TIMERS)
    async with canned_view(*PAIR) as view:
        view.refusal = 429, "too many viewers; close another view"
        await page.open(view.url)
        await page.until_equal("document.getElementById('state').textContent", "too many viewers; close another view")
        view.refusal = None
        await page.until_equal("document.getElementById('state').textContent", "serving")


async def test_hidden_page_does_not_reconnect_and_a_visible_one_does_once(page: Page) -> None:
    await page.run_in_new_documents(FAST_TIMERS)
    async with canned_view(*PAIR) as view:
        await opened(page, view, RECORD_RETRIES)
        view.refusal = 429, "too many viewers"
        for _ in range(3):
            await hide(page, is_hidden=True)
            assert await page.run("retries.size") == 0
            number = view.num_opened
            await hide(page, is_hidden=False)
            await page.until_equal("document.getElementById('state').textContent", "too many viewers")
            await page.until_equal("retries.size", 1)
            assert view.num_opened > number
        view.refusal = None
        await page.until_equal("document.getElementById('state').textContent", "serving")
        assert await page.run("retries.size") == 0


async def test_only_an_unknown_request_is_forgotten(page: Page) -> None:
    async with canned_view(*PAIR) as view:
        request = open_request()
        answers = [(500, {"error": {"message": "internal error"}})]
        view.details = lambda _: answers[-1]
        view.send(open=[request])
        await opened(page, view)
        await page.run("document.querySelector('#requests button').click()")
        await page.until_equal("document.getElementById('detail-text').textContent", "internal error")
        answers.append((200, {**request, "message": "", "attempts": [], "decisions": [], "total": 1.0}))
        view.send(open=[request])
        await page.until("document.getElementById('detail-text').textContent.startsWith('decode;')")
        answers.append((404, {}))
        view.send(open=[request])
        await page.until("document.getElementById('detail-text').textContent.includes('no longer remembered')")


async def test_waterfall_shows_the_phases_of_the_workers(page: Page) -> None:
    phases = [
        {"name": "KV transfer", "begin": 0.3, "end": 0.97, "reported": 0.05},
        {"name": "decode", "begin": 1.0, "end": 1.5, "reported": 0.5},
    ]
    attempt = {"number": 1, "started": 0.0, "placed": 0.1, "lost": None, "legs": [{"worker": "d0", "phases": phases}]}
    candidate = {"worker": "d0", "side": "decode", "excluded": "", "chosen": True, "terms": {"overlap_blocks": 3}}
    column = {"name": "overlap_blocks", "label": "blocks held", "meaning": "cached KV blocks"}
    placement = {"prefill": "p0", "decode": "d0", "ttft": 0.03}
    record = {"attempt": 1, "policy": "mine", "placement": placement, "rejection": None, "excluded": {}, "actuals": {}}
    record["predicted"] = [{"label": "queue", "seconds": 0.01}, {"label": "exposed KV", "seconds": 0.02}]
    details = open_request() | {"message": "", "attempts": [attempt], "first": 0.3, "last": 1.5, "total": 2.0}
    details |= {"decisions": [record | {"candidates": [candidate], "columns": [column]}]}
    async with canned_view(*PAIR) as view:
        view.details = lambda _: (200, details)
        view.send(open=[open_request()])
        await opened(page, view)
        await page.run("document.querySelector('#requests button').click()")
        await page.until_equal("document.querySelectorAll('#waterfall .bar').length", 3)
        rows = await page.run(BARS)
        assert rows["d0 KV transfer"] == ["15.0 to 48.5", "50.0 ms"]
        assert rows["d0 decode"] == ["50.0 to 75.0", "500 ms"]
        verdict = await page.run("document.querySelector('#decisions p').textContent")
        assert verdict == "prefill on p0, decode on d0. Predicted TTFT 30.0 ms = queue 10.0 ms + exposed KV 20.0 ms."
        header = "document.querySelector('#decisions th.n')"
        assert await page.run(f"[{header}.textContent, {header}.title]") == ["blocks held", "cached KV blocks"]
        assert page.problems == []
