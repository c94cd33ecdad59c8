"""Write `deploy/requirements.lock`, the versions and hashes of the Python packages in the image.

    python tools/gen_image_lock.py            resolve and write it; needs uv on the PATH and a package index
    python tools/gen_image_lock.py --check    use no network; exit 1 if it does not fit the project's files

The versions are those of `constraints.txt`. torch is left out with its CUDA packages, because the image's
builder chooses its build (`TORCH_INDEX_URL`); what else torch needs is included.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deploy" / "requirements.lock"
HEAD = "# Written by tools/gen_image_lock.py. torch is installed apart from these.\n"
NOT_LOCKED = re.compile(r"(torch|triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")


def requirements() -> list[str]:
    """Return what the image needs: the dependencies, Redis as a wheel, and what builds the project."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = file["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["embedded"], *file["build-system"]["requires"]]


def with_transitive(needed: Sequence[str]) -> list[str]:
    """Return `needed` with all that the installed packages of these names need on this platform.

    A package that is not installed here, or must not be locked, is not followed.
    """
    found: dict[str, None] = {}
    waiting = [Requirement(each) for each in needed]
    while waiting:
        requirement = waiting.pop()
        name = _normal(requirement.name)
        extras = requirement.extras or {""}
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": e}) for e in extras):
            continue
        if name in found or NOT_LOCKED.fullmatch(name):
            continue
        found[name] = None
        try:
            inner = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for each in map(Requirement, inner):
            if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras):
                each.marker = None
                waiting.append(each)
    return sorted(found)


def resolve(needed: Sequence[str]) -> str:
    """Return the lock of all packages, for every platform. Raises SystemExit if uv is missing or fails."""
    with tempfile.TemporaryDirectory() as directory:
        given, out = Path(directory) / "requirements.in", Path(directory) / "requirements.lock"
        given.write_text("\n".join(needed) + "\n", encoding="utf-8")
        options = ["--quiet", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-header"]
        hidden = ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        files = ["--constraint", str(ROOT / "constraints.txt"), "--output-file", str(out), str(given)]
        try:
            subprocess.run(["uv", "pip", "compile", *options, *hidden, *files], check=True)
        except FileNotFoundError:
            raise SystemExit("uv is not on the PATH: install it, for example with pip install uv") from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"uv could not resolve the packages (exit code {error.returncode})") from error
        return out.read_text(encoding="utf-8")


def entries(text: str) -> Iterator[str]:
    """Yield each package of a lock with its hashes, without comments."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    yield from (entry for entry in re.split(r"\n(?=\S)", "\n".join(lines)) if entry)


def without_torch(text: str) -> str:
    """Return the lock without torch and its CUDA packages."""
    return HEAD + "".join(f"{entry}\n" for entry in entries(text) if not NOT_LOCKED.fullmatch(_normal(_name(entry))))


def problems(lock: str, needed: Sequence[str], constraints: str) -> list[str]:
    """Return what is wrong with a lock: missing packages or hashes, other versions, and addresses."""
    locked, found = {}, []
    for entry in entries(lock):
        pin = _PIN.match(entry)
        if pin is None or not _HASH.search(entry):
            found.append(f"{_name(entry)} has no version or no sha256 hash")
            continue
        locked[_normal(pin[1])] = pin[2]
    found += [f"{name} must not be locked" for name in locked if NOT_LOCKED.fullmatch(name)]
    found += [
        f"{name} is missing"
        for name in map(_normal, map(_name, needed))
        if name not in locked and not NOT_LOCKED.fullmatch(name)
    ]
    versions = _versions(constraints)
    found += [
        f"{name} is {version}, constraints.txt says {versions[name]}"
        for name, version in locked.items()
        if versions.get(name, version) != version
    ]
    return found + (["it has an address"] if "://" in lock else [])


def _versions(constraints: str) -> Mapping[str, str]:
    pins = (_PIN.match(line) for line in constraints.splitlines())
    return {_normal(pin[1]): pin[2] for pin in pins if pin is not None}


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[0] if found is not None else requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: Sequence[str]) -> int:
    """Write or check the lock. Returns the exit code."""
    if "--check" not in arguments:
        LOCK.write_text(without_torch(resolve(requirements())), encoding="utf-8")
        print(f"wrote {LOCK}")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    needed = with_transitive(requirements())
    found = problems(LOCK.read_text(encoding="utf-8"), needed, constraints)
    for problem in found:
        print(f"{LOCK.relative_to(ROOT)}: {problem}; run: python tools/gen_image_lock.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
