"""Hypothesis strategies for core values and protobuf messages.

They are built from type hints and message descriptors, so that new fields are tested without a change here.
"""

import math
import types
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

from baton.core.client_api import TotalUsage
from baton.core.kv.kv_layout import DTYPE_BYTES, KvComponent, KvLayout, LayerGroup
from baton.core.messages.jobs import DecodeJob, Job, PrefillJob
from baton.core.messages.peer_messages import KvReady
from baton.core.request import PromptLogprobs, Sampling
from baton.core.request_limits import LIMITS, Limit
from baton.core.step_cost import COSTS_VERSION, StepCostModel

T = TypeVar("T")

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SMALL = st.integers(1, 64)
HASH = st.binary(min_size=16, max_size=16)
TEXT = st.text(max_size=8)
SECONDS = st.floats(0, 1e9)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
PLAIN_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)

BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "worker_id": st.text(min_size=1, max_size=8),
    "request_id": st.binary(min_size=1, max_size=20),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "hashes": st.lists(HASH, max_size=4).map(tuple),
    "block_hashes": st.lists(HASH, max_size=4).map(tuple),
    "actuals": st.dictionaries(TEXT, PLAIN_JSON, max_size=3),
    "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
    "mean_output_tokens": SECONDS,
    "tokens_per_step": SECONDS,
    "ttft_target_factor": SECONDS,
    "tpot_target_factor": SECONDS,
    "recent_prefill_share": st.floats(0, 1),
    "evicted_reuse": st.floats(0, 1),
}
"""Strategies for fields whose valid values are narrower than their type."""
WIDE = {
    *(
        "worker_epoch",
        "epoch",
        "seed",
        "transfer_id",
        "read_id",
        "renewal",
        "seq",
        "last_seq",
        "oldest_seq",
        "steps_done",
        "lost",
        "generations",
    ),
    *(
        "report_seq",
        "event_seq",
        "kv_bytes",
        "transfer_bytes",
        "inflight_bytes",
        "base_address",
        "block_stride_bytes",
        "num_blocks",
    ),
    *("generation_table_address", "total", "free", "cached", "used", "receiving", "quarantined", "held_for_others"),
    *("waiting_prefill_tokens", "running_context_tokens", "block_bytes", "waiting_prefill_attended_tokens"),
}
"""Fields with unsigned 64-bit integers. All other integer fields have 32 bits."""
WIDE_EXCEPTIONS = {
    ("PrefixSource", "num_blocks"),
    ("PrefixSource", "num_host_blocks"),
    ("PrefixSource", "num_disk_blocks"),
}


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the valid values of a core type or of a union of core types."""
    return _of(kind, "", "")


def _of(kind: Any, name: str, owner: str) -> st.SearchStrategy[Any]:
    if (owner, name) == ("ChoiceDelta", "prompt_logprobs"):  # only HTTP has them
        return st.none()
    if name in BY_NAME and not (owner == "GenerateChunk" or (owner == "Timeline" and name == "request_id")):
        return BY_NAME[name]
    if isinstance(kind, NewType):
        return _of(kind.__supertype__, name, owner)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*[st.none() if each is types.NoneType else _of(each, name, owner) for each in arguments])
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return st.lists(_of(arguments[0], name, owner), max_size=3).map(tuple)
        return st.tuples(*[_of(each, name, owner) for each in arguments])
    if origin in (dict, Mapping):
        return st.dictionaries(TEXT, _of(arguments[1], name, owner), max_size=3)
    if origin is list:  # `TokenIds`, see _dataclass
        return st.lists(U32, max_size=5).map(lambda ids: array("I", ids))
    if is_dataclass(kind):
        return _dataclass(kind)  # type: ignore[arg-type]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return st.builds(kind, **{each: _of(of, each, kind.__name__) for each, of in get_type_hints(kind).items()})
    wide = name in WIDE and (owner, name) not in WIDE_EXCEPTIONS
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        int: U64 if wide else U32,
        float: SECONDS if name.endswith("_s") else NUMBER,
        str: TEXT,
        bytes: st.binary(max_size=8),
        bool: st.booleans(),
    }
    return by_type[kind]


@st.composite
def _prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    """Return a strategy for logprobs whose arrays have matching lengths."""
    num_top, count = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    floats, sizes = st.floats(width=32, allow_nan=False), (count, count * num_top)
    chosen, top_values = (array("f", draw(st.lists(floats, min_size=n, max_size=n))) for n in sizes)
    ranks, top_ids = (array("I", draw(st.lists(U32, min_size=n, max_size=n))) for n in sizes)
    return PromptLogprobs(num_top=num_top, chosen=chosen, ranks=ranks, top_ids=top_ids, top_values=top_values)


@cache
def _dataclass(kind: type) -> st.SearchStrategy[Any]:
    if kind is PromptLogprobs:
        return _prompt_logprobs()
    # before Python 3.12 `array[int]` cannot be evaluated
    hints = get_type_hints(kind, localns={"array": list})
    strategies = {field.name: _of(hints[field.name], field.name, kind.__name__) for field in fields(kind) if field.init}
    if kind in (KvComponent, LayerGroup):
        strategies |= {name: SMALL for name, hint in hints.items() if hint is int}
    if kind is StepCostModel:  # unusable models arrive as None
        strategies = {name: st.floats(1e-9, 1e3) for name in strategies} | {
            "version": st.just(COSTS_VERSION),
            "num_measured": U32,
        }
    if kind is Sampling:
        strategies |= {name: _within(LIMITS[name]) for name, hint in hints.items() if hint is float}
        strategies["bad_words"] = st.lists(st.lists(U32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
        strategies["logit_bias"] = st.lists(st.tuples(U32, _within(LIMITS["logit_bias"])), max_size=3).map(tuple)
    if kind is KvLayout:
        strategies["block_size_tokens"] = SMALL
    if kind is TotalUsage:
        strategies = dict.fromkeys(strategies, U32)  # their sum is sent too and must fit
    build = st.builds(kind, **strategies)
    return build.map(_FIX_UP[kind]) if kind in _FIX_UP else build


def _within(limit: Limit) -> st.SearchStrategy[float]:
    """Return a strategy for the numbers that a request field accepts."""
    low = limit.minimum if limit.above is None else limit.above
    return st.floats(low, limit.maximum, exclude_min=limit.above is not None)


def _valid_job(job: Any) -> Any:
    """Return the job with at least one token and a valid prompt length."""
    ids = job.token_ids if len(job.token_ids) else array("I", [7])
    return _with(job, token_ids=ids, num_prompt_tokens=1 + job.num_prompt_tokens % len(ids))


def _valid_kv_ready(ready: KvReady) -> KvReady:
    """Return the message with equally many block ids, generations and hashes."""
    count = min(len(ready.block_ids), len(ready.generations), len(ready.hashes))
    return _with(
        ready, block_ids=ready.block_ids[:count], generations=ready.generations[:count], hashes=ready.hashes[:count]
    )


def _with(value: T, **changes: Any) -> T:
    return type(value)(**({f.name: getattr(value, f.name) for f in fields(value)} | changes))  # type: ignore[arg-type]


_FIX_UP: dict[type, Callable[[Any], Any]] = {
    Job: _valid_job,
    PrefillJob: _valid_job,
    DecodeJob: _valid_job,
    KvReady: _valid_kv_ready,
}


# Messages of the schema


WEIRD_NUMBERS = st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e308])
WEIRD_BYTES = st.sampled_from([b"", b"x", bytes(16), bytes(17), bytes(32)])


@cache
def messages(kind: Any, depth: int = 4) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a protobuf type with arbitrary field values."""

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if not draw(st.booleans()):
                continue
            if field.is_repeated:
                if field.message_type is not None and field.message_type.GetOptions().map_entry:
                    continue
                items = draw(st.lists(_field_values(field, depth), max_size=2))
                getattr(message, field.name).extend(items)
            elif field.message_type is not None:
                if depth:
                    getattr(message, field.name).CopyFrom(draw(messages(field.message_type._concrete_class, depth - 1)))
            else:
                setattr(message, field.name, draw(_field_values(field, depth)))
        return message

    return build()


def _field_values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type._concrete_class, max(0, depth - 1))
    by_type = {
        FieldDescriptor.CPPTYPE_DOUBLE: WEIRD_NUMBERS,
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 99]),
        FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, -1, 2**31 - 1]),
        FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2**32 - 1]),
        FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**64 - 1]),
        FieldDescriptor.CPPTYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
        FieldDescriptor.CPPTYPE_STRING: WEIRD_BYTES
        if field.type == FieldDescriptor.TYPE_BYTES
        else st.sampled_from(["", "float32", "{", "[]", "[" * 10_000, "ä"]),
    }
    return by_type[field.cpp_type]
