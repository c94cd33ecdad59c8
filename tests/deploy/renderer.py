"""Renders the chart as Helm would: with `helm` where it is on the PATH, else with `chartrender/`, which is
built once; notes and what `lookup` finds, for which helm wants a cluster, always with the latter.

`python -m tests.deploy.renderer` builds it, ahead of the tests, and says what there is.
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
BUILD_LIMIT_S, RENDER_LIMIT_S = 600.0, 30.0

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
                command = [
                    "template",
                    RELEASE,
                    str(chart),
                    "--namespace",
                    namespace,
                    "--kube-version",
                    "1.33.0",
                    *inputs,
                    *flags,
                ]
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
    return own()


@lru_cache
def own() -> Renderer | str:
    """`chartrender/`, or why there is none."""
    if (program := _program()).exists():
        return Renderer(program=program, is_helm=False)
    return "helm: no chartrender in its place: `make chart` builds it, or says why it cannot"


def build() -> str:
    """Build `chartrender/` where it is not yet; where it is then, or why it is not. One process builds, the
    others wait for it."""
    program = _program()
    if program.exists():
        return str(program)
    program.parent.mkdir(parents=True, exist_ok=True)
    with (program.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return str(program)
        unfinished = program.with_suffix(".new")
        command = ["timeout", f"{BUILD_LIMIT_S:.0f}", "bash", str(SOURCE / "build.sh"), str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return f"no chartrender, so tests that need it are skipped: {said[-1]}"
        unfinished.rename(program)
    return str(program)


def _program() -> Path:
    """Where the program of these sources is, or will be: beside the project's Python."""
    files = sorted(SOURCE.iterdir())
    version = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return Path(sys.prefix) / "chartrender" / version


if __name__ == "__main__":
    sys.stdout.write(f"chart      {build()}\n")
