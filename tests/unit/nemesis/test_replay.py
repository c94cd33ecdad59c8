"""The printed command repeats a run: parsed again, it gives the same options and therefore the same plan."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.nemesis.__main__ import how_to_repeat, parse, replay_command
from tests.nemesis.run import Options


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        (60.0, {"seed": 126}),
        (45.0, {"seed": 33, "short_share": 0.0}),
        (1800.0, {"seed": 1, "network": "namespaces"}),
        (45.0, {"seed": 15, "network": "namespaces", "kinds": ("cut_data",), "longest_s": 8.0}),
        (100.0 / 3, {"seed": 2, "kinds": ("pause", "kill"), "longest_s": 0.1}),
    ],
)
def test_replay_command_gives_the_same_options(seconds: float, options: dict[str, Any]) -> None:
    wanted = Options.sized(seconds, **options)
    words = shlex.split(replay_command(wanted))
    assert words[:3] == ["python", "-m", "tests.nemesis"]
    assert parse(words[3:]) == (wanted, False)


def test_failed_test_names_its_seed_its_files_and_the_command() -> None:
    lines = how_to_repeat(Options.sized(60.0, seed=5, short_share=0.0), Path("/tmp/bn-1")).splitlines()
    assert lines[:2] == ["seed 5", "files of the run: /tmp/bn-1"]
    assert lines[2] == "again: python -m tests.nemesis --seconds 60.0 --seed 5 --network loopback --short-share 0.0"
