"""The committed protobuf code is what proto/ generates."""

import importlib
import sys
from pathlib import Path

from tools.gen_proto import OUT_ROOT, PROTO_ROOT, differences, generate, install

SOURCE = """
syntax = "proto3";
package {package};
import "google/protobuf/empty.proto";
message Ping {{ uint64 seq = 1; }}
"""


def write(proto_root: Path, name: str, text: str) -> None:
    file = proto_root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_committed_code_is_fresh(tmp_path: Path) -> None:
    generate(PROTO_ROOT, tmp_path)
    assert differences(tmp_path, OUT_ROOT) == [], "run `make proto`"


def test_committed_code_can_be_imported() -> None:
    packages = ("baton/v1", "baton/wire/v1")
    modules = [file for package in packages for file in (OUT_ROOT / package).glob("*_pb2*.py")]
    assert len(modules) > len(list(PROTO_ROOT.rglob("*.proto"))) > 0
    for file in modules:
        importlib.import_module(".".join(file.relative_to(OUT_ROOT).with_suffix("").parts))


def test_stale_missing_and_leftover_files_are_named(tmp_path: Path) -> None:
    proto, fresh, committed = tmp_path / "proto", tmp_path / "fresh", tmp_path / "committed"
    fresh.mkdir()
    write(
        proto,
        "fresh_or_not/v1/a.proto",
        SOURCE.format(package="fresh_or_not.v1") + "service S { rpc Do(Ping) returns (Ping); }",
    )
    write(proto, "fresh_or_not/v1/b.proto", SOURCE.format(package="fresh_or_not.v1.b"))
    generate(proto, fresh)
    package = committed / "fresh_or_not/v1"
    assert (
        len(differences(fresh, committed)) == 6
    )  # __init__, 2 x (pb2.py, pb2.pyi), and gRPC code for the file with a service

    install(fresh, committed)
    assert differences(fresh, committed) == []
    (package / "a_pb2.py").write_text("# edited by hand\n")
    (package / "b_pb2.pyi").unlink()
    (package / "gone_pb2.py").touch()
    assert differences(fresh, committed) == [
        "missing: fresh_or_not/v1/b_pb2.pyi",
        "left over: fresh_or_not/v1/gone_pb2.py",
        "stale: fresh_or_not/v1/a_pb2.py",
    ]

    install(fresh, committed)
    assert differences(fresh, committed) == []
    sys.path.insert(0, str(committed))
    try:
        grpc_code = importlib.import_module("fresh_or_not.v1.a_pb2_grpc")
    finally:
        sys.path.remove(str(committed))
    assert grpc_code.SServicer
