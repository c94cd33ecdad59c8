"""Tests the parallel loops of the C++ kernels (parallel_for.h)."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from baton.model.kernels.cpu.kernel_build import HERE, OPTIONS, find_compiler

LOOPS = """
#include <numeric>
#include <thread>
#include <vector>

#include "parallel_for.h"

using namespace baton;

// One thread runs three loops while the other thread of its team is stalled; then the other runs them, too.
// Returns how many items were done, plus a million for each item that was left for the stalled thread.
extern "C" int64_t with_stalled_thread(int64_t count) {
    std::vector<LoopCounters> loops(3);
    TeamThread running(loops.data(), 2), stalled(loops.data(), 2);
    int64_t done = 0;
    for (int loop = 0; loop < 3; loop++) running.parallel_for(count, [&](int64_t) { done++; });
    for (int loop = 0; loop < 3; loop++) stalled.parallel_for(count, [&](int64_t) { done += 1'000'000; });
    return done;
}

// Each loop sums up what the loop before has written. Returns the last sum, or -1 if the items differ.
extern "C" int64_t dependent_loops(int32_t threads, int64_t count, int32_t num_loops) {
    std::vector<int64_t> from(size_t(count), 1), to(size_t(count), 0);
    run_team(threads, 2 * num_loops, [&](TeamThread& team) {
        for (int loop = 0; loop < num_loops; loop++) {
            team.parallel_for(count, [&](int64_t i) {
                to[size_t(i)] += std::accumulate(from.begin(), from.end(), int64_t(0)) % 1009;
            });
            team.parallel_for_batched(count, [&](int64_t i) { from[size_t(i)] = to[size_t(i)]; });
        }
    });
    for (int64_t value : from) if (value != from[0]) return -1;
    return from[0];
}
"""


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    where: Path = tmp_path_factory.mktemp("loops")
    (where / "loops.cpp").write_text(LOOPS)
    subprocess.run([find_compiler(), *OPTIONS, f"-I{HERE}", "loops.cpp", "-o", "loops.so"], cwd=where, check=True)
    library = ctypes.CDLL(str(where / "loops.so"))
    library.with_stalled_thread.restype = library.dependent_loops.restype = ctypes.c_int64
    return library


def test_a_thread_stalled_between_two_items_delays_no_other(loops: ctypes.CDLL) -> None:
    for count in (0, 1, 50):
        assert loops.with_stalled_thread(ctypes.c_int64(count)) == 3 * count


def test_each_item_runs_once_and_after_the_loop_before(loops: ctypes.CDLL) -> None:
    """Runs with fewer threads than cores, and with more."""
    for count in (1, 3, 40):
        right, value = 0, 1
        for _ in range(200):
            right += (value * count) % 1009
            value = right
        for threads in (1, 2, 9):
            assert loops.dependent_loops(threads, ctypes.c_int64(count), 200) == right, (count, threads)
