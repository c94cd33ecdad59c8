"""Places the phases that a worker reported about one leg in time, for the waterfall and the trace."""

from dataclasses import dataclass

from baton.core.request import LegTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a leg, on the gateway's event loop clock.

    reported_s: the duration that the worker reported. It is less than the length if the phase was
        interrupted.
    """

    name: str
    begin_s: float
    end_s: float
    reported_s: float


def leg_phases(leg: LegTimeline, placed_s: float, last_s: float | None) -> list[Phase]:
    """Return the phases of a leg in order. Workers report durations, not times.

    What comes before the KV begins at the placement (`placed_s`), decode ends at the last token (`last_s`),
    and the KV arrives between. Reads wait for later chunks of the prompt, so the KV transfer may last longer
    than the time in which a read was running.

    last_s: None if the leg did not send the last token, because its attempt was lost. Its phases then follow
        each other without a gap.
    """
    phases = []
    at_s = placed_s
    before_kv = (("queue", leg.queue_s), ("prefill", leg.compute_s), ("wait for first KV", leg.kv_wait_s))
    for name, seconds in before_kv:
        if seconds:
            phases.append(Phase(name=name, begin_s=at_s, end_s=at_s + seconds, reported_s=seconds))
            at_s += seconds
    transfer_s, admission_s = leg.kv_transfer_s or 0.0, leg.kv_admission_s or 0.0
    first_step_s, decode_s = leg.first_decode_s or 0.0, leg.decode_s or 0.0
    decode_begin_s = at_s + transfer_s + admission_s + first_step_s
    if decode_s and last_s is not None:
        decode_begin_s = max(decode_begin_s, last_s - decode_s)
    kv_end_s = decode_begin_s - first_step_s - admission_s
    if transfer_s:
        phases.append(Phase(name="KV transfer", begin_s=at_s, end_s=kv_end_s, reported_s=transfer_s))
    if admission_s:
        end_s = kv_end_s + admission_s
        phases.append(Phase(name="KV admission", begin_s=kv_end_s, end_s=end_s, reported_s=admission_s))
    if decode_s:
        end_s = decode_begin_s + decode_s
        phases.append(Phase(name="decode", begin_s=decode_begin_s, end_s=end_s, reported_s=decode_s))
    return phases
