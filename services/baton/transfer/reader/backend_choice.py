"""Chooses the transfer backend of one link by measuring all that both workers have."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.core.errors import LayoutMismatch, Reason
from baton.core.messages.peer_messages import GroupMessage
from baton.runtime.logging import get_logger
from baton.transfer.backend import TransferBackend
from baton.transfer.reader.peer_reads import PeerReads

log = get_logger(__name__)

CHOICE_MIN_S = 5.0
CHOICE_MAX_S = 300.0
"""Shortest and longest pause before the backends of a broken link are measured again. It doubles with each
choice, because a measurement of all of them loads a network that may just be slow."""
TRIAL_READ_S = 5.0
"""Longest read while one of several backends is measured, so that a silent one delays the others little."""


class BackendChoice:
    """The backends that can read from one owner, each with its own reads, and which of them is used.

    A link with one backend always uses that. Of several, each is measured once the link is connected, and
    the fastest one that works is used until it breaks. Then all are measured again, after a pause if that was
    done not long ago; during the pause, probes try to repair the one that is used.

    reads: of the backend that is used; None until it is chosen
    reason: the measured speeds, for operators; empty if there was no choice
    """

    def __init__(
        self,
        candidates: Sequence[PeerReads],
        backend: TransferBackend,
        *,
        connect: Callable[[PeerReads], None],
    ) -> None:
        """`candidates`: at least one; all are connected. `connect` raises LayoutMismatch, as `backend`
        does."""
        self._candidates = tuple(candidates)
        self._backend, self._connect = backend, connect
        self._clock = asyncio.get_running_loop().time
        self._pause_s = 0.0
        self._next_s = float("-inf")
        self._is_closed = False
        self._chooses_by: Reason | None = None
        self.is_choosing = False
        self.reason = ""
        self.reads = self._candidates[0] if len(self._candidates) == 1 else None
        for candidate in self._candidates:
            candidate.is_used = self.reads is not None

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all regions of the owner, which are the same for each backend."""
        return self._candidates[0].regions.num_blocks

    @property
    def broken_by(self) -> Reason | None:
        """The reason why the link is broken; None if it is not, or if no backend is chosen yet.

        A link that chooses again is broken until it has chosen.
        """
        if self.is_choosing:
            return self._chooses_by
        return self.reads.broken_by if self.reads is not None else None

    @property
    def may_start(self) -> bool:
        """True if `measure` or `repair` would start a read now."""
        if self.reads is None or self._is_due:
            return any(candidate.may_probe for candidate in self._candidates)
        return self.reads.may_probe

    def reconnect(self) -> None:
        """Connect the backend that is used, or all before the choice, because there is a new stream.

        Raises LayoutMismatch if the backend that is used does not fit any more.
        """
        if self.reads is not None:
            self._connect(self.reads)
        if self.reads is None or self.is_choosing:
            for candidate in self._candidates:
                with suppress(LayoutMismatch):  # then it is not chosen
                    self._connect(candidate)

    def forget(self) -> None:
        """Disconnect all backends, because the link has ended."""
        self._is_closed = True
        for candidate in self._candidates:
            self._forget(candidate)

    def receive(self, message: GroupMessage) -> None:
        """Pass a message of a process group to the backend."""
        for candidate in self._candidates:
            if self._backend.is_two_sided(candidate.memory):
                self._backend.receive(candidate.memory, message)

    async def measure(self) -> None:
        """Measure the backend that is used, or choose one."""
        if self.reads is None:
            await self._choose()
        else:
            await self.reads.warm()

    async def repair(self) -> None:
        """Try to make the broken link usable: with a probe, or from time to time by another choice."""
        if self.reads is None or self._is_due:
            await self._choose()
        else:
            await self.reads.repair()

    @property
    def _is_due(self) -> bool:
        is_broken = self.reads is not None and self.reads.broken
        return is_broken and len(self._candidates) > 1 and self._clock() >= self._next_s

    async def _choose(self) -> None:
        """Measure each backend and use the fastest. One that is not used is disconnected."""
        self._chooses_by = self.reads.broken_by if self.reads is not None else None
        self.is_choosing = True
        try:
            for candidate in self._candidates:
                if not self._is_closed and candidate.may_probe:
                    await self._measure(candidate)
        finally:
            self.is_choosing = False
        if not self._is_closed:
            self._use(max(self._candidates, key=_preference))

    async def _measure(self, candidate: PeerReads) -> None:
        """Connect a candidate and measure it. One that raises an error is broken."""
        if not candidate.is_tried:
            candidate.dialed_s = self._clock()
        candidate.longest_read_s = TRIAL_READ_S
        try:
            self._connect(candidate)
            await candidate.warm()
        except Exception:
            log.exception("kv_backend_failed", owner=str(candidate.owner), transfer=candidate.regions.transfer)
            candidate.break_link(Reason.TRANSFER_FAILED)
        finally:
            candidate.longest_read_s = float("inf")

    def _use(self, chosen: PeerReads) -> None:
        now_s = self._clock()
        self._pause_s = CHOICE_MIN_S if now_s > self._next_s + CHOICE_MAX_S else min(CHOICE_MAX_S, 2 * self._pause_s)
        self._next_s = now_s + self._pause_s
        self.reason = ", ".join(_describe(candidate) for candidate in self._candidates)
        for candidate in self._candidates:
            candidate.is_used = candidate is chosen
            if candidate is not chosen:
                self._forget(candidate)
        self.reads = chosen
        log.info("kv_backend_chosen", owner=str(chosen.owner), transfer=chosen.regions.transfer, measured=self.reason)
        chosen.publish()

    def _forget(self, candidate: PeerReads) -> None:
        for memory in candidate.regions.memories:
            self._backend.forget(memory)


def _preference(candidate: PeerReads) -> tuple[bool, float]:
    is_usable = candidate.is_tried and not candidate.broken
    return is_usable, candidate.bandwidth.bytes_per_s or 0.0


def _describe(candidate: PeerReads) -> str:
    if candidate.broken or not candidate.is_tried:
        return f"{candidate.regions.transfer} {candidate.problem or 'not measured'}"
    rate = candidate.bandwidth.bytes_per_s or 0.0
    return f"{candidate.regions.transfer} {rate / 1e9:.3g} GB/s"
