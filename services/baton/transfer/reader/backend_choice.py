"""Chooses the transfer backend of one link by measuring all that both workers have."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from baton.core.errors import LayoutMismatch, Reason
from baton.core.messages.peer_messages import GroupMessage
from baton.runtime.logging import get_logger
from baton.transfer.backend import TransferBackend
from baton.transfer.reader.peer_reads import PeerReads
from baton.transfer.reader.transfer_observer import TransferObserver

log = get_logger(__name__)

CHOICE_MIN_S = 5.0
CHOICE_MAX_S = 300.0
"""Shortest and longest pause before the backends of a broken link are measured again. It doubles with each
choice, because a measurement of all of them loads a network that may just be slow."""
TRIAL_READ_S = 5.0
"""Longest read while one of several backends is measured, so that a silent one delays the others little."""
MAX_REASON_CHARS = 100
"""Longest reason in `choice_text` why one backend was left out. The text is part of each worker report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBackend:
    """Result of the measurement of one backend. problem: why it cannot be used; empty if it can."""

    transfer: str
    bytes_per_s: float
    problem: str


class BackendChoice:
    """The backends that can read from one owner, each with its own reads, and which of them is used.

    A link with one backend always uses that. Of several, each is measured and validated once the link is
    connected, and the fastest one that is valid is used until it breaks. Then all are measured again, after a
    pause if that was done not long ago; during the pause, probes try to repair the one that is used. A
    backend that broke because pulls failed validation has a pause of its own, and the others are measured at
    once.

    reads: of the backend that is used; None until it is chosen
    reason: the measured speeds and what was left out, for operators; empty if there was nothing to choose
    """

    def __init__(
        self,
        candidates: Sequence[PeerReads],
        backend: TransferBackend,
        *,
        connect: Callable[[PeerReads], None],
        observer: TransferObserver,
        left_out: Mapping[str, str],
    ) -> None:
        """Use the only candidate, or none until `measure` has chosen one.

        candidates: at least one; all are connected
        connect: raises LayoutMismatch, as `backend` does
        left_out: by name of the backend, why others are no candidates
        """
        self._candidates = tuple(candidates)
        self._backend, self._connect = backend, connect
        self._observer, self._left_out = observer, dict(left_out)
        self._clock = asyncio.get_running_loop().time
        self._pause_s = 0.0
        self._next_s = float("-inf")
        self._is_closed = False
        self._chooses_by: Reason | None = None
        self.is_choosing = False
        self.reason = choice_text((), left_out)
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
        """True if the link is broken and its backends are to be measured again.

        A probe cannot repair an invalid backend, so another one that may be tried is looked for at once.
        """
        if self.reads is None or not self.reads.broken or len(self._candidates) == 1:
            return False
        has_other = any(candidate.may_probe for candidate in self._candidates if candidate is not self.reads)
        return self._clock() >= self._next_s or (self.reads.is_invalid and has_other)

    async def _choose(self) -> None:
        """Measure each backend and use the fastest valid one. One that is not used is disconnected."""
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
        """Connect a candidate, measure it and validate what it reads. One that raises an error is broken."""
        candidate.restart()
        candidate.longest_read_s = TRIAL_READ_S
        try:
            self._connect(candidate)
            if not await candidate.revalidate():
                return
            await candidate.warm()
            if not candidate.broken and not self._is_closed:
                await candidate.validate()
        except Exception:
            log.exception("kv_backend_failed", owner=str(candidate.owner), transfer=candidate.regions.transfer)
            candidate.break_link(Reason.TRANSFER_FAILED)
        finally:
            candidate.longest_read_s = float("inf")

    def _use(self, chosen: PeerReads) -> None:
        now_s = self._clock()
        self._pause_s = CHOICE_MIN_S if now_s > self._next_s + CHOICE_MAX_S else min(CHOICE_MAX_S, 2 * self._pause_s)
        self._next_s = now_s + self._pause_s
        measured = [_measured(candidate) for candidate in self._candidates]
        self.reason = choice_text(measured, self._left_out)
        for candidate in self._candidates:
            candidate.is_used = candidate is chosen
            if candidate is not chosen:
                self._forget(candidate)
        self.reads = chosen
        log.info("kv_backend_chosen", owner=str(chosen.owner), transfer=chosen.regions.transfer, measured=self.reason)
        self._observer.backends_measured(chosen.owner, {each.transfer: each.bytes_per_s for each in measured})
        chosen.publish()

    def _forget(self, candidate: PeerReads) -> None:
        for memory in candidate.regions.memories:
            self._backend.forget(memory)


def _preference(candidate: PeerReads) -> tuple[bool, bool, float]:
    """Rank by the last measurement, not by the average, in which earlier reads have a share."""
    is_usable = candidate.is_tried and not candidate.broken
    return is_usable, not candidate.is_invalid, candidate.measured_bytes_per_s


def _measured(candidate: PeerReads) -> MeasuredBackend:
    if candidate.is_tried and not candidate.broken:
        rate, problem = candidate.measured_bytes_per_s, ""
    else:
        rate, problem = 0.0, candidate.problem or "not measured"
    return MeasuredBackend(transfer=candidate.regions.transfer, bytes_per_s=rate, problem=problem)


def choice_text(measured: Sequence[MeasuredBackend], left_out: Mapping[str, str]) -> str:
    """Return the speed or problem of each measured backend, then what was left out, for operators.

    left_out: reasons by name of the backend
    """
    speeds = [f"{each.transfer} {each.problem or f'{each.bytes_per_s / 1e9:.3g} GB/s'}" for each in measured]
    return ", ".join([*speeds, *(f"{name} left out ({_shorten(reason)})" for name, reason in left_out.items())])


def _shorten(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 1]}…"
