"""The open loop in virtual time against a client with known delays: all times are exact."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from baton.sim import virtual_time
from loadgen.loadgen_errors import LoadgenError
from loadgen.measure import request_metrics
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome
from loadgen.plan.plan import Plan
from loadgen.send.client import Exchange, ResolvedRequest
from loadgen.send.prompts import TokenPrompts
from loadgen.send.run import runner
from loadgen.send.run.runner import Runner
from loadgen.send.timers import DueCheck
from loadgen.slo_target import SloTarget
from tests.unit.loadgen.plans import plan, request


class VirtualAlarm:
    """An alarm on the loop's virtual clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        self.close()
        self._handle = self._loop.call_at(at_s, self._callback)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class Server:
    """Implements `Client`: first token after `ttft_s`, the others `gap_s` apart, nothing during `stall`.

    Requests in `broken` fail after one token.
    """

    def __init__(
        self,
        *,
        ttft_s: float = 0.1,
        gap_s: float = 0.01,
        stall: tuple[float, float] = (0.0, 0.0),
        broken: tuple[int, ...] = (),
    ) -> None:
        self._ttft_s = ttft_s
        self._gap_s = gap_s
        self._stall = stall
        self._broken = broken
        self.asks: list[ResolvedRequest] = []
        self.sent: dict[int, float] = {}
        self.hung_up: list[int] = []
        self.start_s = 0.0
        self.due_check = DueCheck()

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    def preconnect(self, num_requests: int, at_most: int) -> bool:
        return False

    def prepare(self, request_sent: ResolvedRequest) -> ResolvedRequest:
        self.asks.append(request_sent)
        return request_sent

    def send(self, prepared: ResolvedRequest, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        exchange.sent_s = loop.time()
        self.sent[prepared.index] = round(loop.time() - self.start_s, 9)
        exchange.set_abort(lambda: self.hung_up.append(prepared.index))
        at_s = loop.time() + self._ttft_s
        num_tokens = 1 if prepared.index in self._broken else prepared.max_tokens
        for number in range(num_tokens):
            begin, end = (self.start_s + edge for edge in self._stall)
            loop.call_at(end if begin <= at_s < end else at_s, self._token, exchange, prepared, number, num_tokens)
            at_s += self._gap_s

    def _token(self, exchange: Exchange, request_sent: ResolvedRequest, number: int, of: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if exchange.is_over:
            return
        exchange.token_ids.append(1000 * request_sent.index + number)
        exchange.add_tokens(now_s, 1)
        if request_sent.index in self._broken:
            exchange.fail(now_s, "broken", status=500)
        elif number == of - 1:
            exchange.finish_reason, exchange.is_complete, exchange.status = "length", True, 200
            exchange.end(now_s)


class Recorder:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


def run(
    planned: Plan,
    server: Server,
    *,
    timeout_s: float = 60.0,
    recorder: Any = None,
    meanwhile: Callable[[Runner], None] | None = None,
    encode_before_start_bytes: int = runner.ENCODE_BEFORE_START_BYTES,
) -> dict[int, Record]:
    """Run the plan and return the records by index. `meanwhile` can schedule actions during the run."""
    recorder = recorder or Recorder()

    async def main() -> Runner:
        loop = asyncio.get_running_loop()
        runs = Runner(
            planned,
            planned.requests,
            server,
            TokenPrompts(planned),
            recorder,
            rules=OutcomeRules(slos=planned.slos),
            timeout_s=timeout_s,
            clock=loop.time,
            alarm=VirtualAlarm,
            encode_before_start_bytes=encode_before_start_bytes,
        )
        runs.prepare()
        server.start_s = loop.time() + 0.5
        if meanwhile is not None:
            meanwhile(runs)
        await runs.run(server.start_s)
        return runs

    done = virtual_time.run(main())
    assert done.counts.ended == len(recorder.records)
    return {record.index: record for record in recorder.records}


def outcomes(planned: Plan, records: Mapping[int, Record]) -> list[RequestOutcome]:
    return [request_metrics.classify(records[index], OutcomeRules(slos=planned.slos)) for index in sorted(records)]


def test_requests_are_sent_at_their_times_for_any_server() -> None:
    planned = plan(*(request(index, (index, 4), at_s=index * 0.05) for index in range(40)))
    server = Server(ttft_s=30.0)
    records = run(planned, server)
    assert server.sent == {index: pytest.approx(index * 0.05) for index in range(40)}
    assert [records[index].intended_s for index in range(40)] == [index * 0.05 for index in range(40)]
    assert request_metrics.invalid_reasons(list(records.values()), OutcomeRules(slos=planned.slos)) == ()


def test_record_times_count_from_the_start() -> None:
    planned = plan(request(0, (0, 4), at_s=2.0, output=3))
    record = run(planned, Server(ttft_s=0.25, gap_s=0.5))[0]
    assert (record.intended_s, record.sent_s, record.ended_s) == (2.0, pytest.approx(2.0), pytest.approx(3.25))
    assert [arrival.at_s for arrival in record.arrivals] == pytest.approx([2.25, 2.75, 3.25])
    assert (record.planned_prompt_tokens, record.planned_output_tokens, record.token_ids) == (4, 3, (0, 1, 2))
    assert (request_metrics.ttft_s(record), request_metrics.tpot_s(record)) == (pytest.approx(0.25), pytest.approx(0.5))


def test_stall_shows_in_every_request_due_during_it() -> None:
    planned = plan(
        *(request(index, (index, 4), at_s=index * 0.1, output=1) for index in range(50)),
        slos={"default": SloTarget(ttft_s=0.5)},
    )
    records = run(planned, Server(ttft_s=0.05, stall=(1.0, 3.0)))
    for index in range(50):
        answer_s = index * 0.1 + 0.05
        expected = 3.0 - index * 0.1 if 1.0 <= answer_s < 3.0 else 0.05
        assert request_metrics.ttft_s(records[index]) == pytest.approx(expected)
    assert outcomes(planned, records).count(RequestOutcome.LATE) == 15  # those due from 1.0 to before 2.5


def test_turns_follow_complete_responses_and_contain_them() -> None:
    planned = plan(
        request(0, (0, 4), at_s=0.0, output=2, session="s"),
        request(1, (0, 4), 0, (1, 2), output=2, session="s", turn=1, after=0, think_s=1.5),
        request(2, (0, 4), 0, (1, 2), 1, (2, 2), output=2, session="s", turn=2, after=1, think_s=0.0),
    )
    server = Server(ttft_s=0.1, gap_s=0.1)
    records = run(planned, server)
    assert server.sent == {0: 0.0, 1: pytest.approx(1.7), 2: pytest.approx(1.9)}
    assert records[2].intended_s == pytest.approx(records[1].ended_s)
    by_index = {request_sent.index: list(request_sent.token_ids) for request_sent in server.asks}
    assert by_index[1][4:6] == [0, 1]
    assert by_index[2][8:10] == [1000, 1001]
    assert len(server.asks) == 3
    assert outcomes(planned, records) == [RequestOutcome.GOOD] * 3


def test_incomplete_turn_cancels_the_rest_of_its_session() -> None:
    planned = plan(
        request(0, (0, 4), at_s=0.0, output=2, session="s"),
        request(1, (0, 4), 0, output=2, session="s", turn=1, after=0, think_s=1.0),
        request(2, (0, 4), 0, 1, output=2, session="s", turn=2, after=1, think_s=1.0),
        request(3, (9, 4), at_s=5.0, output=2),
    )
    server = Server(broken=(0,))
    records = run(planned, server)
    assert outcomes(planned, records) == [
        RequestOutcome.FAILED,
        RequestOutcome.CANCELLED,
        RequestOutcome.CANCELLED,
        RequestOutcome.GOOD,
    ]
    assert (list(server.sent), records[1].sent_s, records[2].intended_s) == ([0, 3], None, pytest.approx(2.1))


def test_planned_cancels_and_timeouts() -> None:
    planned = plan(
        request(0, (0, 4), at_s=0.0, output=8, cancel_after_tokens=3), request(1, (1, 4), at_s=0.5, output=50)
    )
    server = Server(ttft_s=0.1, gap_s=0.1)
    records = run(planned, server, timeout_s=1.95)
    assert outcomes(planned, records) == [RequestOutcome.CANCELLED, RequestOutcome.TIMED_OUT]
    assert (len(records[0].arrivals), records[0].ended_s) == (3, pytest.approx(0.3))
    assert (len(records[1].arrivals), records[1].ended_s, server.hung_up) == (19, pytest.approx(2.45), [0, 1])


def test_stop_keeps_records_and_sends_nothing_more() -> None:
    planned = plan(*(request(index, (index, 4), at_s=float(index), output=20) for index in range(10)))
    server = Server(ttft_s=0.5, gap_s=0.1)

    def stop_later(runs: Runner) -> None:
        asyncio.get_running_loop().call_later(0.5 + 4.2, runs.stop)

    records = run(planned, server, meanwhile=stop_later)
    assert outcomes(planned, records) == [RequestOutcome.GOOD] * 2 + [RequestOutcome.CANCELLED] * 3
    assert (sorted(records), server.hung_up) == ([0, 1, 2, 3, 4], [2, 3, 4])


def test_request_that_cannot_be_sent_does_not_end_the_run() -> None:
    class ServerThatRejectsOne(Server):
        def prepare(self, request_sent: ResolvedRequest) -> ResolvedRequest:
            if request_sent.index == 1:
                raise ValueError("too odd")
            return super().prepare(request_sent)

    planned = plan(*(request(index, (index, 4), at_s=100.0 + index, output=2) for index in range(3)))
    records = run(planned, ServerThatRejectsOne())
    assert outcomes(planned, records) == [RequestOutcome.GOOD, RequestOutcome.FAILED, RequestOutcome.GOOD]
    assert records[1].error == "not sent: ValueError: too odd"


def test_full_disk_ends_the_run() -> None:
    class Full(Recorder):
        def write(self, record: Record) -> None:
            if len(self.records) == 2:
                raise OSError(28, "No space left on device")
            super().write(record)

    planned = plan(*(request(index, (index, 4), at_s=float(index), output=2) for index in range(30)))
    server = Server()
    with pytest.raises(LoadgenError, match="No space left on device"):
        run(planned, server, recorder=Full())
    assert len(server.sent) < 5


def test_bodies_are_encoded_before_they_are_due() -> None:
    planned = plan(*(request(index, (index, 4), at_s=10.0 * index, output=2) for index in range(5)))
    made_at: dict[int, float] = {}

    class NotingServer(Server):
        def prepare(self, request_sent: ResolvedRequest) -> ResolvedRequest:
            made_at[request_sent.index] = asyncio.get_running_loop().time() - self.start_s
            return super().prepare(request_sent)

    server = NotingServer()
    run(planned, server, encode_before_start_bytes=1)
    assert [made_at[index] for index in range(1, 5)] == pytest.approx(
        [10.0 * index - runner.ENCODE_AHEAD_S for index in range(1, 5)], abs=0.03
    )
