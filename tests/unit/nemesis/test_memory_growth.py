"""Memory at the end is compared with minute five; a process without a sample counts as not measured."""

from collections.abc import Mapping

from tests.nemesis.memory_growth import MIB, Memory, MemorySamples


def sampled(*samples: tuple[float, Mapping[str, Memory]]) -> MemorySamples:
    found = MemorySamples(dict, float)
    for at_s, memory in samples:
        found.add(at_s, memory)
    return found


def mib(number: int, pid: int = 1) -> Memory:
    return Memory(pid, number * MIB)


def test_growth_since_minute_five_is_reported() -> None:
    samples = sampled((0.0, {"p0": mib(1)}), (310.0, {"p0": mib(10)}), (600.0, {"p0": mib(50)}))
    assert samples.problems(["p0"], {"p0": mib(42)}) == []
    assert samples.problems(["p0"], {"p0": mib(43)}) == ["p0 has 43 MiB of memory, 10 MiB before"]


def test_restarted_process_is_compared_with_its_own_minute_five() -> None:
    starting, settled = mib(100, pid=2), mib(200, pid=2)
    samples = sampled(
        (0.0, {"d0": mib(90)}), (295.0, {"d0": starting}), (310.0, {"d0": starting}), (595.0, {"d0": settled})
    )
    assert samples.problems(["d0"], {"d0": mib(232, pid=2)}) == []
    assert samples.problems(["d0"], {"d0": mib(233, pid=2)}) == ["d0 has 233 MiB of memory, 200 MiB before"]


def test_process_that_started_at_the_end_is_compared_with_its_predecessors() -> None:
    samples = sampled((0.0, {"d0": mib(90)}), (300.0, {"d0": mib(90)}), (330.0, {"d0": mib(120)}))
    assert samples.problems(["d0"], {"d0": mib(152, pid=2)}) == []
    assert len(samples.problems(["d0"], {"d0": mib(153, pid=2)})) == 1


def test_memory_that_is_not_known_is_reported_as_not_measured() -> None:
    short = sampled((0.0, {"p0": mib(1)}), (299.0, {"p0": mib(1)}))
    assert short.problems(["p0"], {"p0": mib(1)})[0].startswith("not measured: p0 has 0 samples after minute five")
    gone = sampled((300.0, {"p0": mib(1)}))
    assert "not measured: p0" in gone.problems(["p0"], {})[0]
