"""The printed command repeats a run: parsed again, it gives the same options and therefore the same plan."""

import shlex
from typing import Any

import pytest

from tests.nemesis.__main__ import parse, replay_command
from tests.nemesis.run import Options


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        (14.0, {"seed": 126}),
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
