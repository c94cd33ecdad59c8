"""The report of a storm: its transcript, and counts of outcomes and faults."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.core.kv.kv_events import Tier
from baton.sim.virtual_time import running_loop
from baton.worker.tiers.host_tier import TierTotals


@dataclass(slots=True, kw_only=True)
class Downtime:
    """One interval in which a process did not run: it was paused or dead. `end_s` is inf until it is over."""

    process: str
    start_s: float
    end_s: float = float("inf")

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds of this interval within another one."""
        return max(0.0, min(self.end_s, end_s) - max(self.start_s, start_s))


@dataclass(slots=True, kw_only=True)
class ChaosReport:
    """Result of a storm.

    settings: the drawn settings, as text.
    policy: policy that was used instead of the drawn one, or None.
    transcript: all faults and ends of requests, in order.
    outcomes: number of requests by outcome.
    faults: number of faults by kind.
    pauses, deaths: intervals in which processes were paused, or dead.
    store_outages: intervals in which the stores did not work.
    num_lost: messages that were under way in streams that were cut.
    num_audited: cached blocks whose content was compared with their hash.
    num_audited_in_tiers: the same for slots of host and disk tiers.
    num_reloaded: blocks that were reloaded, by tier, of all workers.
    num_accepted_drafts: draft tokens that became output, of workers that lived at the end.
    """

    seed: int
    settings: str = ""
    policy: str | None = None
    transcript: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    pauses: list[Downtime] = field(default_factory=list)
    deaths: list[Downtime] = field(default_factory=list)
    store_outages: list[Downtime] = field(default_factory=list)
    num_lost: int = 0
    num_audited: int = 0
    num_audited_in_tiers: int = 0
    num_reloaded: Counter[str] = field(default_factory=Counter)
    num_accepted_drafts: int = 0

    def record_fault(self, kind: str, target: str) -> None:
        """Count a fault and append it to the transcript."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.note(f"{kind} {target}")

    def note(self, text: str) -> None:
        """Append a line with the present time to the transcript."""
        self.transcript.append(f"{running_loop().now_s:.9f} {text}")

    def count_reloads(self, totals: Iterable[tuple[Tier, TierTotals]]) -> None:
        """Add the blocks that tiers have loaded."""
        for tier, each in totals:
            self.num_reloaded[tier.value] += each.loaded_blocks

    def paused_s(self, process: str, start_s: float, end_s: float) -> float:
        """Return the seconds for which a process was paused within an interval."""
        return sum(pause.overlap_s(start_s, end_s) for pause in self.pauses if pause.process == process)

    def was_killed(self, process: str, start_s: float, end_s: float) -> bool:
        """True if a process was killed within an interval, and was not running again before its end."""
        return any(
            death.process == process and start_s <= death.start_s <= end_s <= death.end_s for death in self.deaths
        )

    def knew_no_scheduler(self, gateway: str, start_s: float, *, margin_s: float) -> bool:
        """True if a gateway that was started again could not find a scheduler until a request began.

        That is the case if the stores did not work at its start, and until `start_s`, but for times that were
        too short.

        margin_s: time in which schedulers are announced and found.
        """
        restarts = [death.end_s for death in self.deaths if death.process == gateway and death.end_s < float("inf")]
        return any(
            outage.start_s - margin_s <= restart_s <= start_s <= outage.end_s + margin_s
            for outage in _joined(self.store_outages, margin_s)
            for restart_s in restarts
        )

    @property
    def replay(self) -> str:
        """The command that runs this seed again."""
        policy = f" --policy {self.policy}" if self.policy is not None else ""
        return f"python -m baton.sim.chaos --seed {self.seed}{policy}"


def _joined(downtimes: Sequence[Downtime], margin_s: float) -> list[Downtime]:
    """Return downtimes of one process in order, as one where less than `margin_s` lies between two."""
    joined: list[Downtime] = []
    for downtime in sorted(downtimes, key=lambda each: each.start_s):
        last = joined[-1] if joined else None
        if last is not None and downtime.start_s <= last.end_s + margin_s:
            joined[-1] = replace(last, end_s=max(last.end_s, downtime.end_s))
        else:
            joined.append(downtime)
    return joined
