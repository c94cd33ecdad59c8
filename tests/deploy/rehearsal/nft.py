"""Sets packet filter rules (nftables) in a network namespace over netlink, without the `nft` program.

Source of the numbers: linux/netfilter/nf_tables.h. A rule is a list of expressions, run one after the other
until one does not match.
"""

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import TypeAlias

from tests.netns import Netns

Expression: TypeAlias = bytes

INPUT, OUTPUT = 1, 3
DROP, ACCEPT = 0, 1
_NETFILTER, _SUBSYSTEM, _IPV4 = 12, 10, 2
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _DEL_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_NESTED = 0x8000
_NETWORK, _TRANSPORT = 1, 2
_ESTABLISHED_OR_RELATED = 2 | 4
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain of rules at `hook`.

    kind: `filter` or `nat`.
    policy: verdict for packets that match no rule.
    """

    name: str
    kind: str
    hook: int
    priority: int
    policy: int = ACCEPT
    rules: list[list[Expression]] = field(default_factory=list)


def established() -> list[Expression]:
    """Match packets of established connections."""
    mask = struct.pack("=I", _ESTABLISHED_OR_RELATED)
    return [
        _expression("ct", (1, _u32(1)), (2, _u32(0))),
        _expression("bitwise", (1, _u32(1)), (2, _u32(1)), (3, _u32(4)), (4, _data(mask)), (5, _data(bytes(4)))),
        _compare(1, bytes(4), is_equal=False),
    ]


def loopback() -> list[Expression]:
    """Match packets from the loopback interface."""
    return [_expression("meta", (1, _u32(1)), (2, _u32(6))), _compare(1, b"lo".ljust(16, b"\0"))]


def source(address: str) -> list[Expression]:
    return [_payload(_NETWORK, 12, 4), _compare(1, IPv4Address(address).packed)]


def destination(address: str) -> list[Expression]:
    return [_payload(_NETWORK, 16, 4), _compare(1, IPv4Address(address).packed)]


def tcp_to(low: int, high: int) -> list[Expression]:
    """Match TCP packets to a port in this inclusive range."""
    return [
        _expression("meta", (1, _u32(1)), (2, _u32(16))),
        _compare(1, bytes([socket.IPPROTO_TCP])),
        _payload(_TRANSPORT, 2, 2),
        _expression(
            "range", (1, _u32(1)), (2, _u32(0)), (3, _data(struct.pack("!H", low))), (4, _data(struct.pack("!H", high)))
        ),
    ]


def one_in(count: int) -> list[Expression]:
    """Match one of `count` packets at random."""
    return [_expression("numgen", (1, _u32(1)), (2, _u32(count)), (3, _u32(1))), _compare(1, struct.pack("=I", 0))]


def verdict(code: int) -> list[Expression]:
    return [
        _expression("immediate", (1, _u32(0)), (2, _attribute(2, _attribute(1, struct.pack("!i", code)), nested=True)))
    ]


def refuse() -> list[Expression]:
    return [_expression("reject", (1, _u32(1)), (2, b"\0"))]


def redirect_to(address: str, port: int) -> list[Expression]:
    return [
        _expression("immediate", (1, _u32(1)), (2, _data(IPv4Address(address).packed))),
        _expression("immediate", (1, _u32(2)), (2, _data(struct.pack("!H", port)))),
        _expression("nat", (1, _u32(1)), (2, _u32(_IPV4)), (3, _u32(1)), (5, _u32(2))),
    ]


class PacketFilter:
    """A table of rules in a namespace. It ends with the namespace."""

    def __init__(self, netns: Netns, table: str) -> None:
        self._table = table
        self._socket = netns.call(
            lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER)
        )
        self._socket.settimeout(_ANSWER_S)
        self._sequence = 0

    def replace(self, chains: Sequence[Chain]) -> None:
        """Replace all rules atomically. Raises OSError with the kernel's error."""
        table = _string(1, self._table)
        messages = [(_NEW_TABLE, _CREATE, table), (_DEL_TABLE, 0, table), (_NEW_TABLE, _CREATE, table)]
        for chain in chains:
            hook = _attribute(1, _u32(chain.hook)) + _attribute(2, struct.pack("!i", chain.priority))
            head = table + _string(3, chain.name) + _attribute(4, hook, nested=True)
            messages.append((_NEW_CHAIN, _CREATE, head + _attribute(5, _u32(chain.policy)) + _string(7, chain.kind)))
            for rule in chain.rules:
                body = table + _string(2, chain.name) + _attribute(4, b"".join(rule), nested=True)
                messages.append((_NEW_RULE, _CREATE | _APPEND, body))
        self._send(messages)

    def close(self) -> None:
        self._socket.close()

    def _send(self, messages: Sequence[tuple[int, int, bytes]]) -> None:
        first = self._sequence
        parts = [self._message(_BATCH_BEGIN, 0, b"", family=0, resource=_SUBSYSTEM)]
        parts += [self._message(_SUBSYSTEM << 8 | kind, flags | _ACK, body) for kind, flags, body in messages]
        parts.append(self._message(_BATCH_END, 0, b"", family=0, resource=_SUBSYSTEM))
        self._socket.send(b"".join(parts))
        missing = set(range(first + 2, first + 2 + len(messages)))
        while missing:
            answer = self._socket.recv(1 << 20)
            while answer:
                (length,) = struct.unpack_from("=I", answer)
                (sequence,) = struct.unpack_from("=I", answer, 8)
                (error,) = struct.unpack_from("=i", answer, 16)
                if error:
                    raise OSError(
                        -error, f"nf_tables: message {sequence - first - 1} of {len(messages)}: {os.strerror(-error)}"
                    )
                missing.discard(sequence)
                answer = answer[(length + 3) & ~3 :]

    def _message(self, kind: int, flags: int, body: bytes, *, family: int = _IPV4, resource: int = 0) -> bytes:
        self._sequence += 1
        header = struct.pack("=IHHII", 20 + len(body), kind, _REQUEST | flags, self._sequence, 0)
        return header + struct.pack("!BBH", family, 0, resource) + body


def _u32(value: int) -> bytes:
    return struct.pack("!I", value)


def _attribute(kind: int, payload: bytes, *, nested: bool = False) -> bytes:
    head = struct.pack("=HH", 4 + len(payload), kind | (_NESTED if nested else 0))
    return head + payload + bytes(-len(payload) % 4)


def _string(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _data(value: bytes) -> bytes:
    return _attribute(1, value)


_NESTING = {"bitwise": {4, 5}, "cmp": {3}, "range": {3, 4}, "immediate": {2}}


def _expression(name: str, *attributes: tuple[int, bytes]) -> Expression:
    data = b"".join(_attribute(kind, payload, nested=kind in _NESTING.get(name, ())) for kind, payload in attributes)
    return _attribute(1, _string(1, name) + _attribute(2, data, nested=True), nested=True)


def _payload(base: int, offset: int, length: int) -> Expression:
    return _expression("payload", (1, _u32(1)), (2, _u32(base)), (3, _u32(offset)), (4, _u32(length)))


def _compare(register: int, value: bytes, *, is_equal: bool = True) -> Expression:
    return _expression("cmp", (1, _u32(register)), (2, _u32(0 if is_equal else 1)), (3, _data(value)))
