"""Faults of files of KV: they damage what they say, and seeds choose the tiers of a run."""

import os
from itertools import product
from pathlib import Path
from random import Random

from tests.nemesis.faults.kv_disk import damage, kv_file, written_ns
from tests.nemesis.plan import DISK_KINDS, KINDS
from tests.nemesis.run import Options

SIZE = 4096


def test_a_file_is_cut_off_or_has_other_bits(tmp_path: Path) -> None:
    sizes = set()
    for seed in range(20):
        path = tmp_path / f"kv-{seed}.baton"
        path.write_bytes(bytes(SIZE))
        damage(path, Random(seed))
        content = path.read_bytes()
        sizes.add(len(content) == SIZE)
        assert content != bytes(SIZE)
    assert sizes == {True, False}


def test_the_file_of_a_process_is_found_with_its_last_write(tmp_path: Path) -> None:
    path = tmp_path / "kv-0.baton"
    with path.open("wb", buffering=0) as file:
        assert kv_file(os.getpid()) == path
        before = written_ns(os.getpid())
        while written_ns(os.getpid()) == before:
            file.write(b"x")


def test_seeds_draw_all_combinations_of_tiers_and_disk_faults_only_with_a_disk() -> None:
    every = [Options.sized(300.0, seed=seed) for seed in range(20)]
    assert {(len(each.tiers), "disk_kv_size" in each.tiers) for each in every} == {
        (host + disk, bool(disk)) for host, disk in product((0, 1), repeat=2)
    }
    for options in every:
        has_faults = not DISK_KINDS.isdisjoint(fault.kind for fault in options.plan())
        assert has_faults == ("disk_kv_size" in options.tiers)


def test_a_run_of_disk_faults_has_a_disk() -> None:
    for seed in range(8):
        options = Options.sized(60.0, seed=seed, kinds=tuple(DISK_KINDS & KINDS.keys()))
        assert "disk_kv_size" in options.tiers
        assert options.plan()
