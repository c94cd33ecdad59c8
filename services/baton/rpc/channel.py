"""Configures gRPC connections and servers: keepalive, message sizes, reconnects and TLS."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio

from baton.rpc.grpc_tls import Tls

Options: TypeAlias = list[tuple[str, str | int]]

MAX_MESSAGE_BYTES = 64 * 2**20
"""Maximum message size; grpc's default of 4 MiB is too small for 1 M tokens."""
MAX_METADATA_BYTES = 64 * 1024
UNREAD_WINDOW_BYTES = 64 * 1024
"""Bytes that a client may send of a message that the server does not read yet."""
CONNECT_S = 5.0
HANDSHAKE_S = 10.0
"""Timeout of TLS handshakes; grpc's default of two minutes would let idle clients hold descriptors."""
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 1.0


def keepalive(heartbeat_s: float) -> Options:
    """Return keepalive options that detect a vanished host within two heartbeats and half a second.

    A ping is sent every heartbeat (by grpc's clients at most once a second) and must be answered within a
    heartbeat and half a second. grpc 1.85 never starts the keepalive timeout. So the ping timeout must be set
    too, which is a minute by default.
    """
    answer_ms = _milliseconds(heartbeat_s + 0.5)
    return [
        ("grpc.keepalive_time_ms", _milliseconds(heartbeat_s)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(heartbeat_s: float, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Return options of connections between services.

    Each channel has its own connection, so that a connect attempt reports the present state, and streams do
    not queue behind each other. HTTP proxies from the environment are not used.
    """
    return [
        *keepalive(heartbeat_s),
        *_sizes(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", _milliseconds(RECONNECT_MIN_S)),
        ("grpc.min_reconnect_backoff_ms", _milliseconds(CONNECT_S)),  # in effect the timeout of one connect attempt
        ("grpc.max_reconnect_backoff_ms", _milliseconds(RECONNECT_MAX_S)),
    ]


def server_options(
    heartbeat_s: float,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    handshake_s: float = HANDSHAKE_S,
    max_streams: int | None = None,
    *,
    has_small_windows: bool = False,
    max_connections: int | None = None,
    idle_s: float | None = None,
) -> Options:
    """Return server options: a port in use is an error (no SO_REUSEPORT), and pings are not rate-limited.

    handshake_s: timeout of TLS handshakes.
    max_streams: largest number of calls at a time on one connection; None sets no limit.
    has_small_windows: a call may send `UNREAD_WINDOW_BYTES` before the server reads its message. Otherwise
        grpc adapts the window to the speed of the connection: it took 7 MiB of each of 200 unread messages.
    max_connections: further connections are closed when they are accepted; None sets no limit.
    idle_s: time after which a connection without calls is closed; None keeps it.
    """
    limits: Options = [
        (name, value)
        for name, value in (
            ("grpc.max_concurrent_streams", max_streams),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_connection_idle_ms", None if idle_s is None else _milliseconds(idle_s)),
        )
        if value is not None
    ]
    windows: Options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", UNREAD_WINDOW_BYTES)]
    return [
        *limits,
        *(windows if has_small_windows else ()),
        *keepalive(heartbeat_s),
        *_sizes(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _milliseconds(handshake_s)),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(heartbeat_s / 2)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_channel(
    address: str,
    options: Sequence[tuple[str, str | int]],
    tls: Tls | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """Create a channel, which connects at its first call; without `tls` it uses plain text.

    credentials: loaded credentials of `tls`; without them, its files are read.

    Raises ConfigError if these files cannot be used.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [("grpc.ssl_target_name_override", tls.name)] if tls.name else []
    return grpc.aio.secure_channel(address, credentials or tls.channel_credentials(), options=[*options, *named])


class PooledChannel:
    """Channel of a `ChannelPool`, with the credentials that opened it and its number of running calls."""

    def __init__(self, channel: grpc.aio.Channel, stub: Any, credentials: grpc.ChannelCredentials | None) -> None:
        self.channel = channel
        self.stub = stub
        self.credentials = credentials
        self.num_calls = 0


class ChannelPool:
    """Channel to one address, replaced by a new one when the credentials change.

    A call stays on the channel on which it began. An old channel is closed when its last call has ended.
    After `retire`, this also applies to the newest channel.
    """

    def __init__(
        self,
        credentials: Callable[[], grpc.ChannelCredentials | None],
        open_: Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel],
        stub: Callable[[grpc.aio.Channel], Any],
    ) -> None:
        """Create a pool. `credentials` must return the same object as long as they have not changed."""
        self._credentials = credentials
        self._open = open_
        self._stub = stub
        self._newest: PooledChannel | None = None
        self._channels: set[PooledChannel] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_retired = False

    @property
    def is_closed(self) -> bool:
        """True if no channel is open, as before the first call."""
        return not self._channels and not self._closing

    def acquire(self) -> PooledChannel:
        """Return the channel for one call, which must be released. Raises what opening a channel raises."""
        credentials, channel = self._credentials(), self._newest
        if channel is None or channel.credentials is not credentials:
            channel = self._replace(channel, credentials)
        channel.num_calls += 1
        return channel

    def release(self, channel: PooledChannel) -> None:
        """End one call on a channel."""
        channel.num_calls -= 1
        self._close_unused(channel)

    def retire(self) -> None:
        """Close each channel when its last call has ended. A later call opens one for itself."""
        self._is_retired = True
        for channel in list(self._channels):
            self._close_unused(channel)

    async def aclose(self) -> None:
        """Close all channels, including those with running calls."""
        channels, self._channels, self._newest = self._channels, set(), None
        await asyncio.gather(*[pooled.channel.close(None) for pooled in channels], *self._closing)

    def _replace(self, old: PooledChannel | None, credentials: grpc.ChannelCredentials | None) -> PooledChannel:
        channel = self._open(credentials)
        self._newest = PooledChannel(channel, self._stub(channel), credentials)
        self._channels.add(self._newest)
        if old is not None:
            self._close_unused(old)
        return self._newest

    def _close_unused(self, pooled: PooledChannel) -> None:
        is_needed = pooled.num_calls or (pooled is self._newest and not self._is_retired)
        if pooled in self._channels and not is_needed:
            self._channels.discard(pooled)
            if pooled is self._newest:
                self._newest = None
            closing = asyncio.get_running_loop().create_task(pooled.channel.close(None))
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
