"""MessageMapping: field coverage, converters, optional fields and renamed fields."""

from dataclasses import dataclass

import pytest

from baton.core.errors import Refused, invalid
from baton.rpc.mappers.message_mapping import MessageMapping, checked, nested, repeated
from baton.wire.v1 import common_pb2, scheduler_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    token: int
    bias: float


def test_fields_are_copied_and_unset_optional_fields_are_none() -> None:
    mapping = MessageMapping(Target, scheduler_pb2.Slo)
    assert mapping.to_wire(Target(ttft_s=0.5)) == scheduler_pb2.Slo(ttft_s=0.5)
    assert mapping.from_wire(scheduler_pb2.Slo(tpot_s=0.0)) == Target(tpot_s=0.0)


def test_renamed_field_is_mapped_in_both_directions() -> None:
    mapping = MessageMapping(Bias, common_pb2.LogitBias, renamed={"token": "token_id"})
    message = common_pb2.LogitBias(token_id=7, bias=0.5)
    assert mapping.to_wire(Bias(token=7, bias=0.5)) == message
    assert mapping.from_wire(message) == Bias(token=7, bias=0.5)


def test_construction_fails_if_a_field_exists_on_one_side_only() -> None:
    with pytest.raises(TypeError, match=r"Bias has the fields .*, but its message has .*token_id"):
        MessageMapping(Bias, common_pb2.LogitBias)
    with pytest.raises(TypeError, match="Target has the fields"):
        MessageMapping(Target, common_pb2.LogitBias)


def test_construction_fails_for_a_converter_of_an_unknown_field() -> None:
    with pytest.raises(TypeError, match=r"Target has no fields \['ttft'\]"):
        MessageMapping(Target, scheduler_pb2.Slo, {"ttft": nested(float, float)})


def test_check_is_called_with_value_and_name_only_if_the_field_is_set() -> None:
    def positive(value: float, field: str) -> float:
        if value <= 0:
            raise invalid(f"{field} is {value}")
        return value

    mapping = MessageMapping(Target, scheduler_pb2.Slo, {"ttft_s": checked(positive)})
    assert mapping.from_wire(scheduler_pb2.Slo()) == Target()
    with pytest.raises(Refused, match=r"ttft_s is -1\.0"):
        mapping.from_wire(scheduler_pb2.Slo(ttft_s=-1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    layer_begin: int
    num_layers: int
    components: tuple[str, ...]
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    worker: str | None
    num_blocks: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0


def test_repeated_and_optional_nested_messages_are_converted() -> None:
    component = repeated(lambda name: common_pb2.KvComponent(name=name), lambda message: message.name)
    groups = MessageMapping(Group, common_pb2.LayerGroup, {"components": component})
    group = Group(layer_begin=1, num_layers=2, components=("k", "v"), window=3)
    assert groups.from_wire(groups.to_wire(group)) == group

    worker = nested(lambda name: common_pb2.WorkerRef(worker_id=name), lambda ref: ref.worker_id, optional=True)
    sources = MessageMapping(Source, common_pb2.PrefixSource, {"worker": worker})
    for source in (Source(worker=None, num_blocks=1), Source(worker="w", num_blocks=2)):
        assert sources.from_wire(sources.to_wire(source)) == source
    assert not sources.to_wire(Source(worker=None, num_blocks=1)).HasField("worker")
