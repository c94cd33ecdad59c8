"""How every connection and every server of ours is set up: keepalive, message sizes, ports, health and
reflection."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio

from baton.rpc.grpc_tls import Tls

Options: TypeAlias = list[tuple[str, str | int]]

MAX_MESSAGE_BYTES = 64 * 2**20
"""1 M tokens are 4 MB, already more than grpc's default."""
MAX_METADATA_BYTES = 64 * 1024
CONNECT_S = 5.0
HANDSHAKE_S = 10.0
"""By itself grpc leaves a connection whose client does not go on with TLS its descriptor for two minutes;
keepalive comes later."""
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 1.0


def keepalive(heartbeat_s: float) -> Options:
    """A host that vanished is found within two heartbeats and half a second: a ping a heartbeat (grpc's
    clients send one a second at most), and as long, plus that, for its answer. grpc 1.85 lets only the ping's
    own timeout, otherwise a minute, end a connection: the one for keepalive is never started."""
    answer_ms = _milliseconds(heartbeat_s + 0.5)
    return [
        ("grpc.keepalive_time_ms", _milliseconds(heartbeat_s)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(heartbeat_s: float, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """For connections between services. Each channel has a connection of its own, so that a dial says what is
    there now and a stream's bytes wait behind no other's. A proxy from the environment is not for them."""
    return [
        *keepalive(heartbeat_s),
        *_sizes(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", _milliseconds(RECONNECT_MIN_S)),
        (
            "grpc.min_reconnect_backoff_ms",
            _milliseconds(CONNECT_S),
        ),  # in truth: how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", _milliseconds(RECONNECT_MAX_S)),
    ]


def server_options(heartbeat_s: float, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """A port that is taken is an error (no SO_REUSEPORT), and a ping from the other side, however often, is
    no abuse."""
    return [
        *keepalive(heartbeat_s),
        *_sizes(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_S)),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(heartbeat_s / 2)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_channel(
    address: str,
    options: Sequence[tuple[str, str | int]],
    tls: Tls | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """A channel, without `tls` within the trust of the network; nothing is dialled before the first call.
    `credentials`: those of `tls`; where they are not given its files are read, which raises ConfigError when
    they cannot be used."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [("grpc.ssl_target_name_override", tls.name)] if tls.name else []
    return grpc.aio.secure_channel(address, credentials or tls.channel_credentials(), options=[*options, *named])


class Line:
    """A channel that was opened with `credentials`, and how many calls are under way on it."""

    def __init__(self, channel: grpc.aio.Channel, stub: Any, credentials: grpc.ChannelCredentials | None) -> None:
        self.channel = channel
        self.stub = stub
        self.credentials = credentials
        self.num_calls = 0


class Lines:
    """The channel to one address, and another one once there are other credentials. A call goes on to its end
    on the channel on which it began; an old channel is closed when its last call has ended."""

    def __init__(
        self,
        credentials: Callable[[], grpc.ChannelCredentials | None],
        open_: Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel],
        stub: Callable[[grpc.aio.Channel], Any],
    ) -> None:
        """`credentials`: those to use now, the same object for as long as they have not changed."""
        self._credentials = credentials
        self._open = open_
        self._stub = stub
        self._newest: Line | None = None
        self._lines: set[Line] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def take(self) -> Line:
        """For one call, after which it is given back. Raises as opening does."""
        credentials, line = self._credentials(), self._newest
        if line is None or line.credentials is not credentials:
            line = self._replace(line, credentials)
        line.num_calls += 1
        return line

    def give_back(self, line: Line) -> None:
        line.num_calls -= 1
        self._close_unused(line)

    async def aclose(self) -> None:
        """Also what is under way ends."""
        lines, self._lines, self._newest = self._lines, set(), None
        await asyncio.gather(*[line.channel.close(None) for line in lines], *self._closing)

    def _replace(self, old: Line | None, credentials: grpc.ChannelCredentials | None) -> Line:
        channel = self._open(credentials)
        self._newest = Line(channel, self._stub(channel), credentials)
        self._lines.add(self._newest)
        if old is not None:
            self._close_unused(old)
        return self._newest

    def _close_unused(self, line: Line) -> None:
        if line in self._lines and line is not self._newest and not line.num_calls:
            self._lines.discard(line)
            closing = asyncio.get_running_loop().create_task(line.channel.close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def _sizes(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
