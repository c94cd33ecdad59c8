"""Shows that the storm finds faults: with each mutation of the code some seed must fail.

`mutations/*.patch` are the mutations. Each says what it breaks, and in a line `Expected: REGEX` which failure
it must produce. A patch that no longer fits must be made again.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.unified_diff import PatchFailed, apply_patch

ROOT = Path(__file__).parents[2]
MUTATIONS = sorted((Path(__file__).parent / "mutations").glob("*.patch"))
MIN_MUTATIONS = 15
MAX_SEEDS = 60
"""Number of seeds within which the storm must find a mutation."""

pytestmark = pytest.mark.sim


def names() -> list[str]:
    return [path.stem for path in MUTATIONS]


def expected_failure(patch: str) -> str:
    """Return the pattern of the failure message that a mutation must produce."""
    found = re.search(r"^Expected: (.+)$", patch, re.MULTILINE)
    assert found is not None, "the patch has no line `Expected: REGEX`"
    return found[1]


def copy_of_services(target: Path) -> Path:
    """Copy the package to `target/services`, and return that path."""
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc", "demo", "*.egg-info")
    shutil.copytree(ROOT / "services", target / "services", ignore=skipped)
    return target / "services"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=names())
def test_mutation_applies_to_the_present_code(mutation: Path, tmp_path: Path) -> None:
    patch = mutation.read_text(encoding="utf-8")
    for line in patch.splitlines():
        if line.startswith("--- a/"):
            path = line.removeprefix("--- a/")
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    for path in apply_patch(patch, tmp_path):
        changed = (tmp_path / path).read_text(encoding="utf-8")
        assert changed != (ROOT / path).read_text(encoding="utf-8")
        compile(changed, path, "exec")


def test_every_mutation_says_what_it_breaks_and_which_failure_shows_it() -> None:
    assert len(MUTATIONS) >= MIN_MUTATIONS
    for mutation in MUTATIONS:
        patch = mutation.read_text(encoding="utf-8")
        assert patch[0].isupper(), mutation.name
        re.compile(expected_failure(patch))


def test_patch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("one\ntwo\n", encoding="utf-8")
    patch = "--- a/file.py\n+++ b/file.py\n@@ -1,2 +1,2 @@\n one\n-three\n+four\n"
    with pytest.raises(PatchFailed, match="0 times"):
        apply_patch(patch, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=names())
def test_storm_finds_the_mutation(mutation: Path, tmp_path: Path) -> None:
    services, patch = copy_of_services(tmp_path), mutation.read_text(encoding="utf-8")
    apply_patch(patch, tmp_path)
    seeds = [str(seed) for seed in range(MAX_SEEDS)]
    run = subprocess.run(
        [sys.executable, "-m", "baton.sim.chaos", "--until-failure", "--seed", *seeds],
        env={**os.environ, "PYTHONPATH": str(services)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    verdicts = [line for line in run.stdout.splitlines() if ": passed" in line or ": FAILED" in line]
    assert verdicts, run.stderr
    assert "FAILED" in verdicts[-1], f"{len(verdicts)} seeds passed with {mutation.stem}"
    assert re.search(expected_failure(patch), verdicts[-1]), (
        f"{mutation.stem} was found by another check: {verdicts[-1]}"
    )
