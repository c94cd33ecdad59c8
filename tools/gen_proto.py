"""Generate the protobuf and gRPC code under services/ from proto/.

    python tools/gen_proto.py            write it (make proto)
    python tools/gen_proto.py --check    list stale, missing and left-over files; exit 1 if there are any

The output depends on the version of grpcio-tools, so the extra `test` pins that version.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc_tools

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
OUT_ROOT = ROOT / "services"
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
_SERVICE = re.compile(r"^service\s+\w+", re.MULTILINE)
_INIT = '"""Generated from {source} by `make proto`."""\n'


def generate(proto_root: Path, out: Path) -> None:
    """Write Python messages, stubs and gRPC code below `out`, one package per directory of .proto files.

    Raises RuntimeError if protoc rejects a file; protoc prints the reason.
    """
    files = sorted(proto_root.rglob("*.proto"))
    services = [file for file in files if _SERVICE.search(file.read_text(encoding="utf-8"))]
    if files:
        _protoc(proto_root, files, f"--python_out={out}", f"--pyi_out={out}")
    if services:
        _protoc(proto_root, services, f"--grpc_python_out={out}")
    for directory in sorted({file.parent.relative_to(proto_root) for file in files}):
        (out / directory / "__init__.py").write_text(
            _INIT.format(source=f"proto/{directory.as_posix()}"), encoding="utf-8"
        )


def differences(fresh: Path, committed: Path) -> list[str]:
    """List the differences between the packages below `committed` and those in `fresh`, one line per file."""
    found = []
    for package in sorted({file.parent.relative_to(fresh) for file in fresh.rglob("*.py")}):
        new, old = _generated_files(fresh / package), _generated_files(committed / package)
        found += [f"missing: {package / name}" for name in sorted(new.keys() - old.keys())]
        found += [f"left over: {package / name}" for name in sorted(old.keys() - new.keys())]
        found += [f"stale: {package / name}" for name in sorted(new.keys() & old.keys()) if new[name] != old[name]]
    return found


def install(fresh: Path, committed: Path) -> None:
    """Copy each generated package from `fresh` to `committed`, and delete leftover files there."""
    for package in sorted({file.parent.relative_to(fresh) for file in fresh.rglob("*.py")}):
        target = committed / package
        target.mkdir(parents=True, exist_ok=True)
        for name in _generated_files(target):
            (target / name).unlink()
        for name in _generated_files(fresh / package):
            shutil.copy(fresh / package / name, target / name)


def _generated_files(package: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in package.glob("*.py*") if file.suffix in (".py", ".pyi")}


def _protoc(proto_root: Path, files: Sequence[Path], *outputs: str) -> None:
    """Run protoc in its own process, because NIXL's libraries abort in a process that has loaded protoc's."""
    arguments = [f"-I{proto_root}", f"-I{WELL_KNOWN}", *outputs, *map(str, files)]
    if subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=False).returncode != 0:
        raise RuntimeError(f"protoc failed on {proto_root}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the protobuf and gRPC code under services/ from proto/.")
    parser.add_argument("--check", action="store_true", help="change nothing; list differences from the generated code")
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate(PROTO_ROOT, fresh)
        if not check:
            install(fresh, OUT_ROOT)
            return 0
        found = differences(fresh, OUT_ROOT)
    for line in found:
        print(line)
    if found:
        print("the generated code does not match proto/; run `make proto`")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
