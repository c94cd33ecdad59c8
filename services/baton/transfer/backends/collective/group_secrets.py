"""Secrets of one group, by which each side verifies that the other end of the connection is its peer.

Gloo accepts connections from everyone and assigns them to groups by a small number. Each side therefore
makes a random secret for each group and gives it to the other one over the store, which the authenticated
stream of the two workers carries. The first message of each way repeats the secret of its receiver. The
reader's comes first. The owner sends its own one, and blocks, only after it has compared that.
"""

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.transfer.backends.collective.process_group import READER_RANK, GroupFailed, ProcessGroup
from baton.transfer.backends.collective.rendezvous_store import RendezvousStore

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSecrets:
    """The secrets of one group. own: what the other side must repeat. other: what this side repeats."""

    own: bytes
    other: bytes

    def is_from_peer(self, message: bytes) -> bool:
        """Return whether a first message comes from the other worker."""
        return hmac.compare_digest(message, self.own)


def secret_key(rank: int) -> str:
    """Return the key of the secret that `rank` has made."""
    return f"secret/{rank}"


def exchange_secrets(store: RendezvousStore, rank: int) -> GroupSecrets:
    """Publish a new secret and wait for that of the other side.

    Raises GroupFailed if that has another size, and the errors of `RendezvousStore.get`.
    """
    own = secrets.token_bytes(SECRET_BYTES)
    store.set(secret_key(rank), own)
    other = store.get(secret_key(1 - rank))
    if len(other) != SECRET_BYTES:
        raise GroupFailed(f"the other worker's secret has {len(other)} bytes; must be {SECRET_BYTES}")
    return GroupSecrets(own=own, other=other)


def verify_peer(
    group: ProcessGroup, rank: int, known: GroupSecrets, left_s: Callable[[], float], device: torch.device | str
) -> None:
    """Exchange the first messages of a group and compare the received one.

    Raises GroupFailed, also if the other end is not the other worker.

    left_s: returns how much of the time limit is left
    device: of the memory that the group sends from
    """
    repeated = torch.frombuffer(bytearray(known.other), dtype=torch.uint8).to(device)
    received = torch.zeros(SECRET_BYTES, dtype=torch.uint8).to(device)
    if rank == READER_RANK:
        group.wait(group.start_send(repeated), left_s())
    group.wait(group.start_receive(received), left_s())
    if not known.is_from_peer(received.cpu().numpy().tobytes()):
        raise GroupFailed("who has connected does not know this group's secret, so it is not the other worker")
    if rank != READER_RANK:
        group.wait(group.start_send(repeated), left_s())
