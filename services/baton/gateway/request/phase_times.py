"""Where the seconds of one request went, by phase, as its workers told it."""

from collections.abc import Iterator

from baton.gateway.request.delivery import Delivery
from baton.gateway.request.request_run import RequestRecord

PHASES = ("placement", "queue", "prefill", "kv_exposed", "admission", "decode")


def phases(record: RequestRecord, progress: Delivery, received_s: float) -> Iterator[tuple[str, float]]:
    """(phase, seconds) of all attempts, as far as they were told. `placement`: until the first one, with what
    was waited for it."""
    if record.placed_s is not None:
        yield "placement", record.placed_s - received_s
    for legs in progress.legs.values():
        for leg in legs:
            told = (leg.queue_s, leg.compute_s, leg.kv_exposed_s, leg.kv_admission_s, leg.decode_s)
            yield from (
                (phase, seconds) for phase, seconds in zip(PHASES[1:], told, strict=True) if seconds is not None
            )
