"""Conversion of core dataclasses to plain JSON values and back."""

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Code, Failure
from baton.core.interfaces import Member, MemberKind
from baton.core.messages.jobs import SessionHello
from baton.core.plain_json import from_plain, to_plain
from baton.core.request import Sampling
from tests import builders
from tests.unit.rpc.strategies import values

MEMBER = Member(kind=MemberKind.WORKER, member_id="w0", epoch=2**64 - 1, address="h:1", info=(("pid", "7"),))


@pytest.mark.parametrize("kind", [Member, DecisionRecord, WorkerReport, SessionHello, Failure, Sampling])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_value_is_unchanged_after_a_json_round_trip(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    assert from_plain(kind, json.loads(json.dumps(to_plain(value), allow_nan=False))) == value


def test_json_form_is_readable() -> None:
    assert to_plain(MEMBER) == {
        "kind": "worker",
        "member_id": "w0",
        "epoch": "0xffffffffffffffff",
        "address": "h:1",
        "info": [["pid", "7"]],
    }
    assert to_plain(Code.NOT_FOUND) == "NOT_FOUND"
    assert to_plain({"bytes": b"\x00\xff", "small": 2**53, "never": math.inf}) == {
        "bytes": "00ff",
        "small": 2**53,
        "never": "inf",
    }


def test_unknown_fields_are_ignored_and_missing_ones_get_defaults() -> None:
    plain = {**to_plain(MEMBER), "added_later": [1, 2]}
    del plain["info"]
    assert from_plain(Member, plain) == Member(kind=MemberKind.WORKER, member_id="w0", epoch=2**64 - 1, address="h:1")


def test_float_with_an_integer_value_is_read_as_integer() -> None:
    assert from_plain(Member, {**to_plain(MEMBER), "epoch": 7.0}).epoch == 7
    assert type(from_plain(Member, {**to_plain(MEMBER), "epoch": 7.0}).epoch) is int


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "nobody"}, "Member.kind is 'nobody'; must be one of scheduler, gateway, worker"),
        ({"kind": ["worker"]}, "Member.kind"),
        ({"epoch": "seven"}, "Member.epoch is 'seven'; must be an integer"),
        ({"epoch": True}, "Member.epoch is True; must be an integer"),
        ({"epoch": 1.5}, "Member.epoch is 1.5; must be an integer"),
        ({"epoch": None}, "Member.epoch"),
        ({"address": 7}, "Member.address is a value of type int; must be str"),
        ({"info": {"a": "b"}}, "Member.info is a value of type dict; must be list"),
        ({"info": [["a"]]}, r"Member.info\[0\] has 1 items; must have 2"),
    ],
)
def test_error_names_the_field_that_does_not_fit(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        from_plain(Member, {**to_plain(MEMBER), **changes})


@pytest.mark.parametrize("plain", [None, [], "x", 7, {}])
def test_value_that_is_not_an_object_is_rejected(plain: object) -> None:
    with pytest.raises(ValueError, match="Member"):
        from_plain(Member, plain)


def test_bytes_must_be_hex_and_numbers_numbers() -> None:
    plain = to_plain(builders.query())
    kind = type(builders.query())
    with pytest.raises(ValueError, match="request_id is 'xyz'; must be hex digits"):
        from_plain(kind, {**plain, "request_id": "xyz"})
    with pytest.raises(ValueError, match="deadline_s"):
        from_plain(kind, {**plain, "deadline_s": "soon"})
    with pytest.raises(ValueError, match="deadline_s"):
        from_plain(kind, {**plain, "deadline_s": False})


def test_unsupported_type_raises_type_error() -> None:
    with pytest.raises(TypeError, match="set cannot be converted to JSON"):
        to_plain({"a": {1, 2}})

    @dataclass
    class Odd:
        value: complex

    with pytest.raises(TypeError, match=r"Odd\.value"):
        from_plain(Odd, {"value": 1})
