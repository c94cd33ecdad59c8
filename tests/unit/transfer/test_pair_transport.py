"""The transport of a pair is taken from the lines that UCX logs for this pair, or is unknown."""

import os
from collections.abc import Iterator

import pytest

from baton.core.ids import ReadId
from baton.transfer.backends.first_reads import MAX_ALONE_S, FirstReads
from baton.transfer.backends.host_memory import host_id
from baton.transfer.backends.nixl.pair_transport import UNKNOWN_TRANSPORT, PairTransports, PeerKind, ucx_environment
from baton.transfer.backends.nixl.ucx import UcxLog

TABLE = """\
[1.0] [vm:1:0]   | rd {}-node cfg#1                                                        |
[1.0] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1:0]   | 0..inf | zero-copy   | {}                  |
[1.0] [vm:1:0]   +--------+-------------+-------------------------------------------+
"""
CMA, TCP, RDMA = ("intra", "cma/memory"), ("inter", "tcp/eth0"), ("inter", "rc_mlx5/mlx5_0:1")
LOCAL = PeerKind(environment=f"{host_id()}/a", memory_kind="host")
FAR = PeerKind(environment="other-machine/a", memory_kind="host")


class Log:
    """A UCX log in memory, and the transports that are read from it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("log")
        self.transports = PairTransports(UcxLog(self.fd))

    def read(self, kind: PeerKind, *tables: tuple[str, str], was_alone: bool = True) -> str:
        """Make the first read of a peer, during which UCX logs `tables`."""
        self.transports.begin_first_read()
        self.logs(*tables)
        return self.transports.end_first_read(kind, was_alone=was_alone)

    def logs(self, *tables: tuple[str, str]) -> None:
        for table in tables:
            os.write(self.fd, TABLE.format(*table).encode())


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    os.close(log.fd)


def test_each_peer_gets_the_transport_of_its_own_tables(log: Log) -> None:
    assert log.read(LOCAL, CMA) == "cma"
    assert log.read(FAR, TCP) == "tcp"


def test_lines_that_were_logged_before_the_first_read_belong_to_others(log: Log) -> None:
    log.logs(CMA)
    assert log.read(FAR, TCP) == "tcp"


def test_peer_without_tables_shares_the_transport_of_its_environment(log: Log) -> None:
    assert log.read(LOCAL, CMA) == "cma"
    assert log.read(FAR, TCP) == "tcp"
    assert log.read(LOCAL) == "cma"
    assert log.read(FAR) == "tcp"


def test_peer_of_another_machine_never_uses_shared_memory(log: Log) -> None:
    assert log.read(LOCAL, CMA) == "cma"
    assert log.read(FAR, TCP) == "tcp"
    assert log.read(PeerKind(environment="third-machine/a", memory_kind="host")) == "tcp"


@pytest.mark.parametrize("tables", [(CMA, TCP), (TCP, CMA)])
def test_local_peer_of_another_environment_is_unknown_if_several_are_possible(
    log: Log, tables: tuple[tuple[str, str], ...]
) -> None:
    for kind, table in zip((LOCAL, FAR), tables, strict=True):
        log.read(kind, table)
    assert log.read(PeerKind(environment=f"{host_id()}/b", memory_kind="host")) == UNKNOWN_TRANSPORT


def test_remote_peer_is_unknown_if_two_networks_are_possible(log: Log) -> None:
    assert log.read(FAR, TCP) == "tcp"
    assert log.read(PeerKind(environment="third-machine/a", memory_kind="host"), RDMA) == "rdma"
    assert log.read(PeerKind(environment="fourth-machine/a", memory_kind="host")) == UNKNOWN_TRANSPORT


def test_tables_of_reads_that_were_not_alone_are_not_assigned(log: Log) -> None:
    assert log.read(LOCAL, CMA, TCP, was_alone=False) == UNKNOWN_TRANSPORT
    assert log.read(FAR, was_alone=False) == "tcp"


def test_tables_of_host_memory_say_nothing_about_device_memory(log: Log) -> None:
    in_device = PeerKind(environment="third-machine/a", memory_kind="cuda")
    assert log.read(FAR, TCP) == "tcp"
    assert log.read(in_device) == UNKNOWN_TRANSPORT
    assert log.read(in_device, RDMA) == "rdma"
    assert log.read(PeerKind(environment="fourth-machine/a", memory_kind="cuda")) == "rdma"
    assert log.read(PeerKind(environment="fourth-machine/a", memory_kind="host")) == "tcp"


def test_cuda_ipc_may_connect_machines(log: Log) -> None:
    for number, table in enumerate([("intra", "cuda_ipc/cuda"), RDMA]):
        log.read(PeerKind(environment=f"machine-{number}/a", memory_kind="cuda"), table)
    assert log.read(PeerKind(environment="third-machine/a", memory_kind="cuda")) == UNKNOWN_TRANSPORT


def test_two_new_tables_of_different_transports_are_unknown(log: Log) -> None:
    assert log.read(FAR, TCP, RDMA) == UNKNOWN_TRANSPORT


def test_nothing_is_known_without_a_log() -> None:
    transports = PairTransports(UcxLog(-1))
    transports.begin_first_read()
    assert transports.end_first_read(LOCAL, was_alone=True) == UNKNOWN_TRANSPORT


def test_environment_depends_on_the_ucx_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    before = ucx_environment()
    assert before == ucx_environment()
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert ucx_environment() != before
    assert ucx_environment().split("/")[0] == before.split("/")[0] == host_id()


def begin(first: FirstReads[str], number: int, key: str, now_s: float = 0.0, asked_s: float | None = None) -> bool:
    return first.begin(ReadId(number), key, now_s, asked_s=now_s if asked_s is None else asked_s)


def test_first_reads_of_different_peers_run_one_after_the_other() -> None:
    first: FirstReads[str] = FirstReads()
    posted: list[str] = []
    assert begin(first, 1, "a")
    assert first.is_first(ReadId(1))
    assert begin(first, 2, "a")  # of the same peer
    assert not first.is_first(ReadId(2))
    assert not begin(first, 3, "b")
    first.hold(0.0, lambda: posted.append("b"))
    assert list(first.due(0.5)) == []
    assert first.end(ReadId(1), is_done=True) == ("a", True)
    assert first.end(ReadId(2), is_done=True) is None
    for post in first.due(0.5):
        post()
    assert posted == ["b"]
    assert begin(first, 3, "b", 0.5)
    assert first.is_first(ReadId(3))
    assert begin(first, 4, "a", 0.5)  # known
    assert first.end(ReadId(3), is_done=True) == ("b", True)


def test_silent_peer_delays_others_for_a_bounded_time_and_none_counts_as_alone() -> None:
    first: FirstReads[str] = FirstReads()
    assert begin(first, 1, "silent")
    assert not begin(first, 2, "b")
    first.hold(0.0, lambda: None)
    assert len(list(first.due(MAX_ALONE_S))) == 1
    assert begin(first, 2, "b", MAX_ALONE_S, asked_s=0.0)
    assert not begin(first, 3, "c", MAX_ALONE_S)
    assert first.end(ReadId(2), is_done=True) == ("b", False)
    assert begin(first, 3, "c", MAX_ALONE_S + 0.1)  # the silent peer keeps nobody waiting any more
    assert first.end(ReadId(3), is_done=True) == ("c", False)
    assert first.end(ReadId(1), is_done=False) is None
    assert begin(first, 4, "silent", 3.0)
    assert first.end(ReadId(4), is_done=True) == ("silent", True)


def test_six_peers_that_connect_together_are_each_read_alone_in_the_end() -> None:
    """A first read takes 0.4 s. Those that have waited for 1 s begin together, and are read again alone."""
    first, now_s, number, took_s = FirstReads[str](), 0.0, 0, 0.4
    waiting = dict.fromkeys("abcdef", 0.0)
    running: dict[ReadId, tuple[str, float]] = {}
    alone: dict[str, bool] = {}
    while waiting or running:
        for peer, asked_s in list(waiting.items()):
            number += 1
            if begin(first, number, peer, now_s, asked_s):
                running[ReadId(number)] = (peer, now_s)
                del waiting[peer]
                assert now_s - asked_s <= MAX_ALONE_S + 0.05
        now_s += 0.05
        for read_id, (peer, began_s) in list(running.items()):
            if now_s >= began_s + took_s:
                del running[read_id]
                ended = first.end(read_id, is_done=True)
                alone[peer] = ended is not None and ended[1]
                if not alone[peer]:
                    waiting[peer] = now_s  # the next read of the link
        assert now_s < 10.0
    assert alone == dict.fromkeys("abcdef", True)


def test_key_whose_transport_is_known_is_not_ordered_any_more() -> None:
    first: FirstReads[str] = FirstReads()
    assert begin(first, 1, "a")
    first.settle("b")
    assert begin(first, 2, "b")


def test_failed_first_read_is_tried_again_and_forgotten_keys_are_new() -> None:
    first: FirstReads[str] = FirstReads()
    assert begin(first, 1, "a")
    assert first.end(ReadId(1), is_done=False) is None
    assert begin(first, 2, "a")
    assert first.end(ReadId(2), is_done=True) == ("a", True)
    first.forget(lambda key: key == "a")
    assert begin(first, 3, "a")
    assert first.end(ReadId(3), is_done=True) == ("a", True)
