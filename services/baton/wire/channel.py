"""How every connection and every server of ours is set up: keepalive, message sizes, ports, health and reflection."""

from collections.abc import Sequence
from typing import TypeAlias

import grpc
import grpc.aio

from baton.wire.tls import Tls

Options: TypeAlias = list[tuple[str, str | int]]

MAX_MESSAGE_BYTES = 64 * 2**20
"""1 M tokens are 4 MB, already more than grpc's default."""
MAX_METADATA_BYTES = 64 * 1024
CONNECT_S = 5.0
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 1.0


def keepalive(heartbeat_s: float) -> Options:
    """A host that vanished is found within two heartbeats and half a second: a ping a heartbeat (grpc's clients send one a second at most),
    and as long, plus that, for its answer. grpc 1.85 lets only the ping's own timeout, otherwise a minute, end a connection: the one
    for keepalive is never started."""
    answer_ms = _milliseconds(heartbeat_s + 0.5)
    return [
        ("grpc.keepalive_time_ms", _milliseconds(heartbeat_s)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(heartbeat_s: float, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """For connections between services. Each channel has a connection of its own, so that a dial says what is there now and a stream's
    bytes wait behind no other's. A proxy from the environment is not for them."""
    return [
        *keepalive(heartbeat_s),
        *_sizes(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", _milliseconds(RECONNECT_MIN_S)),
        ("grpc.min_reconnect_backoff_ms", _milliseconds(CONNECT_S)),  # in truth: how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", _milliseconds(RECONNECT_MAX_S)),
    ]


def server_options(heartbeat_s: float, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """A port that is taken is an error (no SO_REUSEPORT), and a ping from the other side, however often, is no abuse."""
    return [
        *keepalive(heartbeat_s),
        *_sizes(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(heartbeat_s / 2)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_channel(address: str, options: Sequence[tuple[str, str | int]], tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel, without `tls` within the trust of the network; nothing is dialled before the first call. Raises ConfigError for files of
    `tls` that cannot be read."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [("grpc.ssl_target_name_override", tls.name)] if tls.name else []
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*options, *named])


def _sizes(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
