"""Drives a headless Chromium over its debugging pipe (Chrome DevTools Protocol), without further packages."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
PIPE_FLAGS = (*FLAGS, "--no-first-run", "--remote-debugging-pipe")
CALL_S = 60.0
_WITH_PIPE = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from file descriptor 3 and writes answers to 4."""


class Page:
    """One page of the browser. `problems` has its console warnings and errors, and failed script."""

    def __init__(self, browser: "Browser", session: str, context: str) -> None:
        self._browser = browser
        self._context = context
        self.session = session
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        return await self._browser.call(method, parameters, self.session)

    async def run(self, script: str) -> Any:
        """Return the JSON value of an expression; a promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def _run_if_loaded(self, script: str) -> Any:
        """Return the value of an expression; None while the page is being replaced by another."""
        try:
            return await self.run(script)
        except AssertionError as error:
            if "navigated" in str(error) or "context" in str(error):
                return None
            raise

    async def until(self, script: str, accept: Callable[[Any], object] = bool, limit_s: float = 60.0) -> Any:
        """Evaluate until the value is accepted, and return it."""
        last: Any = None
        try:
            async with asyncio.timeout(limit_s):
                while not accept(last := await self._run_if_loaded(script)):  # noqa: ASYNC110 - the page is polled
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{script} is still {last!r} after {limit_s:g} s") from None
        return last

    async def until_equal(self, script: str, expected: str | int) -> None:
        """Evaluate until the value equals `expected`."""
        await self.until(script, lambda value: value == expected)

    async def open(self, url: str) -> None:
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run_in_new_documents(self, script: str) -> None:
        """Run a script in each document that is opened from now on, before its own scripts."""
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def close(self) -> None:
        """Close the page and forget its cookies. The browser goes on."""
        await self._browser.call("Target.disposeBrowserContext", {"browserContextId": self._context})

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            code = {"Tab": 9, "Enter": 13, "Escape": 27}.get(key, ord(key[0].upper()))
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    async def resize(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size in CSS pixels and the preferred colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        taken = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(taken["data"]))


class Browser:
    """A running browser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader, self._writer = reader, writer
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}

    async def call(self, method: str, parameters: dict[str, Any] | None = None, session: str = "") -> Any:
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters or {}}
        self._writer.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        async with asyncio.timeout(CALL_S):
            return await answer

    async def new_page(self) -> Page:
        """Open an empty page with its own cookies."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        created = await self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attached = await self.call("Target.attachToTarget", {"targetId": created["targetId"], "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"], context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        return page

    async def read(self) -> None:
        """Read answers and events until the browser ends."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._answered(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    _note_problem(page, message["method"], message["params"])

    def _answered(self, message: dict[str, Any]) -> None:
        answer = self._answers[message["id"]]
        if answer.done():
            return
        if "error" in message:
            answer.set_exception(AssertionError(message["error"]))
        else:
            answer.set_result(message["result"])


def _note_problem(page: Page, method: str, event: dict[str, Any]) -> None:
    if method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
        page.problems.append(str([each.get("value", each.get("description")) for each in event["args"]]))
    elif method == "Runtime.exceptionThrown":
        page.problems.append(str(event["exceptionDetails"]))
    elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
        page.problems.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Browser]:
    """Run a browser with an empty profile."""
    assert BROWSER is not None
    command_r, command_w = os.pipe()
    answer_r, answer_w = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _WITH_PIPE, str(command_r), str(answer_w)),
        *(BROWSER, *PIPE_FLAGS, f"--user-data-dir={profile}", "about:blank"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(command_r, answer_w),
    )
    os.close(command_r)
    os.close(answer_w)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 * 2**20)
    incoming, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answer_r, "rb"))
    outgoing, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(command_w, "wb"))
    browser = Browser(reader, outgoing)
    reading = asyncio.create_task(browser.read())
    try:
        yield browser
    finally:
        with contextlib.suppress(Exception):
            await browser.call("Browser.close")
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        outgoing.close()
        incoming.close()
