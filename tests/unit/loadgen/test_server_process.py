"""Server commands with placeholders, and sweeps of their values."""

import pytest

from loadgen.loadgen_errors import LoadgenError
from loadgen.send.server.server_process import ServerCommand, SweepPoint, free_port, parse_sweep


def test_sweep_names_its_points() -> None:
    points = parse_sweep("p:d=1:1, 1:2,2:1")
    assert [dict(point.values) for point in points] == [
        {"p": "1", "d": "1"},
        {"p": "1", "d": "2"},
        {"p": "2", "d": "1"},
    ]
    assert [point.name for point in points] == ["p=1,d=1", "p=1,d=2", "p=2,d=1"]
    assert [point.name for point in parse_sweep("model=a.gguf,b.gguf")] == ["model=a.gguf", "model=b.gguf"]


@pytest.mark.parametrize(
    "text", ["", "p", "p=", "=1", "p:d=1", "p:d=1:2:3", "p:d=1:", "p:p=1:2", "port=1,2", "a b=1", "p=1,1"]
)
def test_invalid_sweeps_are_rejected(text: str) -> None:
    with pytest.raises(LoadgenError):
        parse_sweep(text)


def test_placeholders_are_filled_per_argument() -> None:
    points = parse_sweep("p:d=1:2")
    command = ServerCommand.parse("serve --prefill {p} --decode={d} --port {port} --text '{{a b}} {p}'", points)
    assert command.has_port
    assert command.at(points[0], 99) == ["serve", "--prefill", "1", "--decode=2", "--port", "99", "--text", "{a b} 1"]
    assert not ServerCommand.parse("serve", [SweepPoint(values={})]).has_port
    spaced = [SweepPoint(values={"x": "a b; rm -rf /"})]
    assert ServerCommand.parse("echo {x}", spaced).at(spaced[0], 1) == ["echo", "a b; rm -rf /"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("serve {p} {q}", "{q}, but --sweep has no value for it"),
        ("serve", "--command does not contain {p}"),
        ("serve {p} '", "No closing quotation"),
        ("serve {p} {", "brace"),
        ("serve {}", "{}, but --sweep has no value for it"),
        ("  ", "empty"),
    ],
)
def test_invalid_commands_are_rejected(text: str, message: str) -> None:
    with pytest.raises(LoadgenError, match=r".") as raised:
        ServerCommand.parse(text, parse_sweep("p=1"))
    assert message in str(raised.value)


def test_free_port_can_be_bound() -> None:
    assert 1024 < free_port() < 65536
