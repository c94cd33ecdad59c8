"""Runs a plan against any server inside the test's own event loop."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from loadgen.measure import request_metrics
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome
from loadgen.plan.plan import Plan
from loadgen.send.client import Client
from loadgen.send.prompts import new_prompts
from loadgen.send.run.runner import Runner
from loadgen.send.target import Target, new_client
from loadgen.send.timers import now_s

ROOT = Path(__file__).resolve().parents[3]
LOADGEN = [sys.executable, "-m", "loadgen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Records of a run. `started_s` is its start by the machine's clock."""

    records: list[Record]
    started_s: float
    rules: OutcomeRules

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [request_metrics.classify(record, self.rules) for record in self.records]


class _RecordList:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


async def measure(plan: Plan, target: Target, *, timeout_s: float = 20.0, client: Client | None = None) -> Measured:
    """Send the plan and return the records in the order of the plan."""
    client = client or new_client(target)
    rules, written = OutcomeRules(slos=plan.slos, ignore_eos=plan.ignore_eos), _RecordList()
    await client.open()
    try:
        runner = Runner(
            plan, plan.requests, client, new_prompts(plan, target), written, rules=rules, timeout_s=timeout_s
        )
        runner.prepare()
        started_s = now_s() + 0.05
        async with asyncio.timeout(60):
            await runner.run(started_s)
    finally:
        await client.aclose()
    return Measured(records=sorted(written.records, key=lambda record: record.index), started_s=started_s, rules=rules)
