"""Clients of the gateways in the rehearsal.

Each request uses a new connection, which is retried if refused.
"""

import json
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.netns import Netns

REFUSED_S = 30.0
REFUSED_POLL_S = 0.1
LIMIT_S = 60.0
MAX_TOKENS = 24
PAUSE_S = 0.2
QUESTIONS = (
    "What does os.path.join do?",
    "How do I read a file line by line?",
    "What is a list comprehension?",
    "When is a generator better than a list?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client. `host`: name in the gateway's certificate. `address`: address of its Service."""

    host: str
    address: str
    port: int
    api_key: str = field(repr=False)
    context: ssl.SSLContext

    def ask(self, question: str, *, streams: bool) -> str:
        """Return the answer. Raises AssertionError if it is incomplete, httpx.HTTPError if there is none."""
        end_s = time.monotonic() + REFUSED_S
        while True:
            try:
                return self._ask(question, streams)
            except httpx.ConnectError as error:
                if not _is_refused(error) or time.monotonic() > end_s:
                    raise
            time.sleep(REFUSED_POLL_S)

    def _ask(self, question: str, streams: bool) -> str:
        messages = [{"role": "user", "content": question}]
        body = {"model": "demo", "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": streams}
        headers = {"authorization": f"Bearer {self.api_key}", "host": self.host}
        with httpx.Client(
            base_url=f"https://{self.address}:{self.port}", verify=self.context, timeout=LIMIT_S
        ) as client:
            answer = client.post(
                "/v1/chat/completions", json=body, headers=headers, extensions={"sni_hostname": self.host}
            )
        assert answer.status_code == httpx.codes.OK, answer.text
        return _streamed(answer.text) if streams else _whole(answer.json()["choices"][0], "message")


class Load:
    """Threads on another simulated machine that send requests until the end of the block, every second one
    streamed.

    failed: errors, including answers that differ from the expected ones.
    """

    def __init__(self, client: Client, netns: Netns, right: Sequence[str], *, num_threads: int) -> None:
        self.answered = 0
        self._asked = 0
        self.failed: list[str] = []
        self.longest_s = 0.0
        self._client = client
        self._right = right
        self._end = threading.Event()
        self._counting = threading.Lock()
        self._threads = [
            threading.Thread(target=netns.call, args=(self._run,), name=f"load-{n}") for n in range(num_threads)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._end.wait(PAUSE_S):
            with self._counting:
                number = self._asked
                self._asked += 1
            which = number % len(QUESTIONS)
            began_s = time.monotonic()
            try:
                said = self._client.ask(QUESTIONS[which], streams=number // len(QUESTIONS) % 2 == 0)
                why = "" if said == self._right[which] else f"said {said!r}, not {self._right[which]!r}"
            except Exception as error:
                why = repr(error)
            took_s = time.monotonic() - began_s
            with self._counting:
                self.answered += 1
                self.longest_s = max(self.longest_s, took_s)
                if why:
                    self.failed.append(
                        f"{number}, {took_s:.2f} s, ended {time.strftime('%H:%M:%S', time.gmtime())}: {why}"
                    )


def _whole(choice: dict[str, object], field: str) -> str:
    assert choice["finish_reason"] in ("stop", "length"), choice
    content = choice[field]
    assert isinstance(content, dict)
    return str(content["content"])


def _streamed(text: str) -> str:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1:] == ["[DONE]"], text
    chunks = [json.loads(event) for event in events[:-1]]
    assert all("choices" in chunk for chunk in chunks), text
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] in (["stop"], ["length"]), text
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _is_refused(error: BaseException) -> bool:
    """Return True if the connection was refused. httpx nests the cause."""
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    return any(isinstance(cause, ConnectionRefusedError) for cause in causes)
