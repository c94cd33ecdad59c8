"""Memory at the end is compared with minute five; a process without a sample counts as not measured."""

from collections.abc import Mapping

from tests.nemesis.memory_growth import MIB, MemorySamples


def sampled(*samples: tuple[float, Mapping[str, int]]) -> MemorySamples:
    found = MemorySamples(dict, float)
    for at_s, memory in samples:
        found.add(at_s, memory)
    return found


def test_growth_since_minute_five_is_reported() -> None:
    samples = sampled((0.0, {"p0": MIB}), (310.0, {"p0": 10 * MIB}), (600.0, {"p0": 50 * MIB}))
    assert samples.problems(["p0"], {"p0": 42 * MIB}) == []
    assert samples.problems(["p0"], {"p0": 43 * MIB}) == ["p0 has 43 MiB of memory, 10 MiB before"]


def test_process_that_was_down_at_minute_five_counts_from_its_next_sample() -> None:
    samples = sampled((300.0, {"p0": MIB}), (315.0, {"p0": MIB, "d0": 20 * MIB}))
    assert samples.problems(["d0"], {"d0": 52 * MIB}) == []
    assert len(samples.problems(["d0"], {"d0": 53 * MIB})) == 1


def test_memory_that_is_not_known_is_reported_as_not_measured() -> None:
    short = sampled((0.0, {"p0": MIB}), (299.0, {"p0": MIB}))
    assert short.problems(["p0"], {"p0": MIB}) == [
        "not measured: p0 has 0 samples after minute five, 1048576 bytes at the end"
    ]
    gone = sampled((300.0, {"p0": MIB}))
    assert "not measured: p0" in gone.problems(["p0"], {})[0]
