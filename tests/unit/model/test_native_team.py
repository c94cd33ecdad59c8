"""Loops that a team of threads goes through together."""

import ctypes
import subprocess

import pytest

from baton.model.kernels.cpu.kernel_build import HERE, OPTIONS, find_compiler

TEAM = """
#include <numeric>
#include <thread>
#include <vector>

#include "parallel_for.h"

using namespace baton;

// How many of the items of three loops were done while the other member of the team never came; then that one goes through them, too.
extern "C" int64_t without_the_other(int64_t count) {
    std::vector<Loop> loops(3);
    Member here(loops.data(), 2), away(loops.data(), 2);
    int64_t done = 0;
    for (int loop = 0; loop < 3; loop++) here.each(count, [&](int64_t) { done++; });
    for (int loop = 0; loop < 3; loop++) away.each(count, [&](int64_t) { done += 1'000'000; });
    return done;
}

// Each loop adds up what the one before has written, in loops of `count` items by so many threads. Its last sum: all terms are equal.
extern "C" int64_t one_after_another(int32_t threads, int64_t count, int32_t num_loops) {
    std::vector<int64_t> from(size_t(count), 1), to(size_t(count), 0);
    by_team(threads, 2 * num_loops, [&](Member& member) {
        for (int loop = 0; loop < num_loops; loop++) {
            member.each(count, [&](int64_t i) { to[size_t(i)] += std::accumulate(from.begin(), from.end(), int64_t(0)) % 1009; });
            member.each_short(count, [&](int64_t i) { from[size_t(i)] = to[size_t(i)]; });
        }
    });
    for (int64_t value : from) if (value != from[0]) return -1;
    return from[0];
}
"""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    where = tmp_path_factory.mktemp("team")
    (where / "team.cpp").write_text(TEAM)
    subprocess.run([find_compiler(), *OPTIONS, f"-I{HERE}", "team.cpp", "-o", "team.so"], cwd=where, check=True)
    made = ctypes.CDLL(str(where / "team.so"))
    made.without_the_other.restype = made.one_after_another.restype = ctypes.c_int64
    return made


def test_who_is_held_up_between_two_items_holds_up_nobody(team: ctypes.CDLL) -> None:
    for count in (0, 1, 50):
        assert team.without_the_other(ctypes.c_int64(count)) == 3 * count


def test_each_item_is_done_once_after_all_of_the_loop_before(team: ctypes.CDLL) -> None:
    """With more threads than cores, and fewer."""
    for count in (1, 3, 40):
        right, value = 0, 1
        for _ in range(200):
            right += (value * count) % 1009
            value = right
        for threads in (1, 2, 9):
            assert team.one_after_another(threads, ctypes.c_int64(count), 200) == right, (count, threads)
