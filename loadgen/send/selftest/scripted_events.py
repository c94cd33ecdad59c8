"""The bytes of one scripted response: head, events and chunks. When they are sent is up to the server."""

from __future__ import annotations

import json
import zlib
from typing import Any

from loadgen.send.selftest.script import Script, ScriptedEnd, ServedRequest


class ScriptedEvents:
    """The events of one response in their order. The tokens depend on the prompt and on `Script.salt`.

    num_tokens: tokens of the whole response
    """

    def __init__(self, served: ServedRequest, script: Script, *, is_chat: bool) -> None:
        self._served = served
        self._script = script
        self._is_chat = is_chat
        body = served.body
        self._prompt = body.get("prompt") or [
            ord(c) for message in body.get("messages", ()) for c in message["content"]
        ]
        self.num_tokens = int(body.get("max_tokens", 16)) if script.num_tokens is None else script.num_tokens
        self._num_made = 0
        self._first_id = (
            sum(map(ord, self._prompt)) if isinstance(self._prompt, str) else sum(self._prompt)
        ) + script.salt
        self._deflate = zlib.compressobj(wbits=31) if script.is_compressed else None

    @property
    def has_more(self) -> bool:
        """True if `tokens` has not returned all tokens yet."""
        return self._num_made < self.num_tokens

    def head(self) -> bytes:
        """Return status line and headers."""
        encoding = "Content-Encoding: gzip\r\n" if self._script.is_compressed else ""
        more = "".join(f"{name}: {value}\r\n" for name, value in self._script.headers.items())
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{encoding}{more}Transfer-Encoding: chunked\r\n\r\n"
        )
        return head.encode()

    def tokens(self) -> bytes:
        """Return the event with the next tokens."""
        script = self._script
        index = self._num_made
        num = min(script.tokens_per_event, self.num_tokens - index)
        self._num_made += num
        ids = [1000 + (self._first_id + i) % 1000 for i in range(index, index + num)]
        is_last = not self.has_more and script.ending in (ScriptedEnd.DONE, ScriptedEnd.NO_DONE)
        finish = f'"{script.finish_reason}"' if is_last else "null"
        text = json.dumps("".join(f" t{token}" for token in ids))
        text = f'"delta":{{"content":{text}}}' if self._is_chat else f'"text":{text}'
        given = f',"token_ids":{ids}' if script.token_ids and self._served.body.get("return_token_ids") else ""
        choice = f'{{"index":0,{text},"finish_reason":{finish}{given}}}'
        return f'data: {{"id":"s-{self._served.number}","choices":[{choice}]}}\n\n'.encode()

    def usage(self) -> bytes:
        """Return the event with usage and, if requested, times; empty if the script sends no usage."""
        if not self._script.usage:
            return b""
        num_prompt_tokens = len(self._prompt)
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_made,
            "total_tokens": num_prompt_tokens + self._num_made,
        }
        event: dict[str, Any] = {"id": f"s-{self._served.number}", "choices": [], "usage": usage}
        if self._served.body.get("timeline"):
            event["baton"] = {"received_s": self._served.received_s, "sent_s": self._served.sent_s}
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def chunk(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return the data in HTTP's chunked encoding."""
        if self._deflate is not None:
            data = self._deflate.compress(data) + self._deflate.flush(zlib.Z_FINISH if is_last else zlib.Z_SYNC_FLUSH)
        return b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if is_last else b"")
