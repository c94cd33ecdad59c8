"""A proxy in front of Redis that can delay its replies."""

import asyncio
from urllib.parse import urlsplit

CHUNK_BYTES = 64 * 1024


class RedisProxy:
    """Listens on the loopback interface and forwards bytes to a Redis behind a `unix://` URL.

    delay_s: delay of each reply from now on.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._path = ""
        self._server: asyncio.Server | None = None

    async def start(self, url: str) -> str:
        """Start the proxy in front of the Redis at `url`. Return the URL of the proxy."""
        self._path = urlsplit(url).path
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind_reader, behind_writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, behind_writer), self._pass_on(behind_reader, writer, is_answer=True))

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                if is_answer and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
