"""Renders the chart as Helm would: with `helm` where it is on the PATH, else with `chartrender/`, which is built once.

`python -m tests.deploy.renderer` builds it ahead of the tests, and says which of the two there is.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "baton"
SOURCE = Path(__file__).parent / "chartrender"
RELEASE, NAMESPACE = "rel", "serving"
BUILD_LIMIT_S, RENDER_LIMIT_S = 900.0, 30.0

Doc: TypeAlias = dict[str, Any]


class RenderError(Exception):
    """The chart refused these values; the message is what a user would see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """One of the two programs. `is_helm`: it has no -lookup and no -notes."""

    program: Path
    is_helm: bool

    def text(
        self,
        values: Mapping[str, Any],
        *,
        files: Sequence[Path] = (),
        chart: Path = CHART,
        namespace: str = NAMESPACE,
        flags: Sequence[str] = (),
    ) -> str:
        """What is sent to Kubernetes. `values` go over `files`. Raises RenderError."""
        with tempfile.TemporaryDirectory() as directory:
            own = Path(directory) / "values.yaml"
            own.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
            inputs = [argument for file in (*files, own) for argument in ("-f", str(file))]
            if self.is_helm:
                command = ["template", RELEASE, str(chart), "--namespace", namespace, "--kube-version", "1.33.0", *inputs, *flags]
            else:
                command = ["-name", RELEASE, "-namespace", namespace, *inputs, *flags, str(chart)]
            done = subprocess.run([self.program, *command], capture_output=True, text=True, timeout=RENDER_LIMIT_S)
        if done.returncode:
            raise RenderError(done.stderr)
        return done.stdout

    def docs(self, values: Mapping[str, Any], **options: Any) -> tuple[Doc, ...]:
        """The same as objects."""
        return parse(self.text(values, **options))


def parse(text: str) -> tuple[Doc, ...]:
    """The objects in a stream of YAML."""
    return tuple(doc for doc in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if doc)


@lru_cache
def find() -> Renderer | str:
    """The renderer, or why there is none."""
    if helm := shutil.which("helm"):
        return Renderer(program=Path(helm), is_helm=True)
    try:
        return Renderer(program=_built(), is_helm=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"helm: not on the PATH, and chartrender cannot be built here ({type(error).__name__})"


def _built() -> Path:
    """The program of these sources, built beside the project's Python where it is not there yet; one process builds, the others wait."""
    files = sorted(SOURCE.iterdir())
    version = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    cache = Path(sys.prefix) / "chartrender"
    program = cache / version
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            unfinished = cache / f"{version}.new"
            build = ["bash", str(SOURCE / "build.sh"), str(unfinished)]
            subprocess.run(build, check=True, timeout=BUILD_LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            unfinished.rename(program)
    return program


if __name__ == "__main__":
    found = find()
    sys.stdout.write(f"chart      {found if isinstance(found, str) else found.program}\n")
