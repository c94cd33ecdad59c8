"""Converts the messages of the public API, `baton.v1`, from and to `core.client_api`.

A GenerateRequest becomes the dict of an equivalent `/v1/completions` body, with only the fields that the
client set. The gateway validates both in the same way; here only what a dict cannot express is checked.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from baton.core.client_api import (
    ChoiceDelta,
    ClusterStatus,
    GenerateChunk,
    MessagePart,
    ModelInfo,
    PartKind,
    ProcessInfo,
    Timeline,
    TotalUsage,
    WorkerStatus,
)
from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.cluster.worker_report import (
    BlockCounts,
    LinkReport,
    ReloadCounts,
    TierReport,
    WorkerRole,
    WorkerState,
)
from baton.core.errors import invalid
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.plain_json import from_plain, to_plain
from baton.core.request import FinishReason, LegTimeline, TokenLogprobs
from baton.core.request_limits import LIMITS, MIN_ARRAY_IDS, OutOfLimits
from baton.rpc.mappers.common_mapper import EnumMap
from baton.rpc.mappers.message_mapping import MessageMapping, nested, repeated
from baton.v1 import admin_pb2, inference_pb2

PART_KINDS = EnumMap(PartKind, inference_pb2.PartKind)
FINISH_REASONS = EnumMap(FinishReason, inference_pb2.FinishReason)
ROLES = EnumMap(WorkerRole, admin_pb2.WorkerRole)
STATES = EnumMap(WorkerState, admin_pb2.WorkerState)

FIELDS_JSON = "fields_json"
"""Field with further fields of the body, as JSON. The gateway reads it."""
_SCALARS = (
    "model",
    "session",
    "retain_s",
    "next_in_s",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "priority",
    "timeline",
    "skip_special_tokens",
    FIELDS_JSON,
)
_LISTS = ("stop", "stop_token_ids")
IDS_PER_SLICE = 8 * 1024
"""Token ids that are converted in one call, during which no other thread runs."""
_SLO = ("ttft_ms", "tpot_ms")
_MESSAGE_FIELDS = frozenset(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
_ALWAYS = {"stream": True, "return_token_ids": True}
"""Fields that are implied for every call over gRPC."""


def from_generate_request(message: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """Convert a request to a completions body.

    Raises Refused if both prompt and token_ids are set, or if a list is too long, which is checked before it
    is converted.
    """
    for name in (*_LISTS, "logit_bias"):
        _check_count(name, len(getattr(message, name)))
    body = {**_set_fields(message, _SCALARS), **_ALWAYS}
    body |= {field: list(value) for field in _LISTS if (value := getattr(message, field))}
    if message.HasField("prompt"):
        body["prompt"] = message.prompt
    if message.token_ids:
        if "prompt" in body:
            raise invalid("both prompt and token_ids are set; send one of them")
        _check_count("token_ids", len(message.token_ids))
        body["prompt"] = from_token_ids(message.token_ids)
    if message.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in message.logit_bias.items()}
    if message.HasField("slo"):
        body["slo"] = _set_fields(message.slo, _SLO)
    return body


def from_token_ids(values: Sequence[int]) -> "list[int] | TokenIds":
    """Convert the token ids of a message: to a list, or to an array if there are many."""
    if len(values) < MIN_ARRAY_IDS:
        return list(values)
    ids = token_ids()
    for at in range(0, len(values), IDS_PER_SLICE):
        ids.extend(values[at : at + IDS_PER_SLICE])
    return ids


def from_tokenize_request(message: inference_pb2.TokenizeRequest) -> dict[str, Any]:
    """Convert a request to the body of an equivalent `/tokenize` call."""
    body = _set_fields(message, ("model", FIELDS_JSON))
    return body if FIELDS_JSON in body and not message.prompt else {**body, "prompt": message.prompt}


def to_tokenize_response(ids: TokenIds) -> bytes:
    """Convert token ids to a serialized TokenizeResponse.

    Its list comes in several parts, which every protobuf reader joins.
    """
    return b"".join(
        inference_pb2.TokenizeResponse(token_ids=ids[at : at + IDS_PER_SLICE]).SerializeToString()
        for at in range(0, len(ids), IDS_PER_SLICE)
    )


def from_detokenize_request(message: inference_pb2.DetokenizeRequest) -> dict[str, Any]:
    """Convert a request to the body of an equivalent `/detokenize` call."""
    return {**_set_fields(message, ("model",)), "tokens": from_token_ids(message.token_ids)}


def _check_count(name: str, count: int) -> None:
    """Raise Refused if a list has too many items, with the gateway's message."""
    try:
        LIMITS[name].check_count(name, count)
    except OutOfLimits as error:
        raise invalid(str(error)) from error


def to_generate_request(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Convert a body to a request, for Baton's own clients. Only that of a chat may have further fields.

    Raises TypeError or ValueError for an unknown field or an invalid value.
    """
    fields = {name: value for name, value in body.items() if name not in _ALWAYS}
    prompt = fields.pop("prompt", None)
    if prompt is not None:
        fields["prompt" if isinstance(prompt, str) else "token_ids"] = prompt
    if (biases := fields.pop("logit_bias", None)) is not None:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    if (slo := fields.pop("slo", None)) is not None:
        fields["slo"] = inference_pb2.Slo(**slo)
    if "messages" in fields:
        further = {name: fields.pop(name) for name in tuple(fields) if name not in _MESSAGE_FIELDS}
        fields[FIELDS_JSON] = json.dumps(further, ensure_ascii=False)
    return inference_pb2.GenerateRequest(**fields)


def _set_fields(message: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def to_generate_response(chunk: GenerateChunk) -> inference_pb2.GenerateResponse:
    """Convert a chunk of a generation to a message of its stream."""
    message = inference_pb2.GenerateResponse()
    for choice in chunk.choices:
        out = message.choices.add(
            index=choice.index, text=choice.text, token_ids=choice.token_ids, stop_string=choice.stop_string
        )
        for logprobs in choice.logprobs:
            top = out.logprobs.add(logprob=logprobs.logprob).top
            for token_id, logprob in logprobs.top:
                top.add(token_id=token_id, logprob=logprob)
        for part in choice.parts:
            kind = PART_KINDS.to_wire(part.kind)
            out.parts.add(kind=kind, text=part.text, call_index=part.call_index, call_id=part.call_id)
        if choice.finish is not None:
            out.finish_reason = FINISH_REASONS.to_wire(choice.finish)
    if chunk.usage is not None:
        usage = chunk.usage
        message.usage.prompt_tokens = usage.num_prompt_tokens
        message.usage.completion_tokens = usage.num_output_tokens
        message.usage.total_tokens = usage.num_prompt_tokens + usage.num_output_tokens
        message.usage.cached_tokens = usage.num_cached_tokens
        message.usage.reasoning_tokens = usage.num_reasoning_tokens
    if chunk.timeline is not None:
        message.timeline.CopyFrom(_TIMELINE.to_wire(chunk.timeline))
    return message


def from_generate_response(message: inference_pb2.GenerateResponse) -> GenerateChunk:
    """Convert a message of a generation's stream to a chunk."""
    usage = message.usage
    return GenerateChunk(
        choices=tuple(
            ChoiceDelta(
                index=choice.index,
                text=choice.text,
                parts=tuple(
                    MessagePart(
                        kind=PART_KINDS.from_wire(part.kind),
                        text=part.text,
                        call_index=part.call_index,
                        call_id=part.call_id,
                    )
                    for part in choice.parts
                ),
                token_ids=tuple(choice.token_ids),
                logprobs=tuple(
                    TokenLogprobs(logprob=each.logprob, top=tuple((top.token_id, top.logprob) for top in each.top))
                    for each in choice.logprobs
                ),
                finish=FINISH_REASONS.from_wire(choice.finish_reason) if choice.HasField("finish_reason") else None,
                stop_string=choice.stop_string,
            )
            for choice in message.choices
        ),
        usage=TotalUsage(
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_reasoning_tokens=usage.reasoning_tokens,
        )
        if message.HasField("usage")
        else None,
        timeline=_TIMELINE.from_wire(message.timeline) if message.HasField("timeline") else None,
    )


_LEG = MessageMapping(LegTimeline, inference_pb2.LegTimeline)
_TIMELINE = MessageMapping(
    Timeline,
    inference_pb2.Timeline,
    {"cached_tokens_by_tier": nested(dict, dict), "legs": repeated(_LEG.to_wire, _LEG.from_wire)},
)
_MODEL = MessageMapping(ModelInfo, inference_pb2.Model, renamed={"model_id": "id"})

to_model, from_model = _MODEL.to_wire, _MODEL.from_wire

_PROCESS = MessageMapping(ProcessInfo, admin_pb2.Process, renamed={"process_id": "id"})
_WORKER_ID = MessageMapping(WorkerRef, admin_pb2.WorkerId)
_LINK = MessageMapping(LinkReport, admin_pb2.Link, {"peer": nested(_WORKER_ID.to_wire, _WORKER_ID.from_wire)})
# the public API keeps the name `landing`
_BLOCKS = MessageMapping(BlockCounts, admin_pb2.BlockCounts, renamed={"receiving": "landing"})
_TIER = MessageMapping(TierReport, admin_pb2.TierStatus)
_RELOADS = MessageMapping(ReloadCounts, admin_pb2.ReloadCounts)
_WORKER = MessageMapping(
    WorkerStatus,
    admin_pb2.WorkerStatus,
    {
        "worker": nested(_WORKER_ID.to_wire, _WORKER_ID.from_wire),
        "role": nested(ROLES.to_wire, ROLES.from_wire),
        "state": nested(STATES.to_wire, STATES.from_wire),
        "blocks": nested(_BLOCKS.to_wire, _BLOCKS.from_wire),
        "links": repeated(_LINK.to_wire, _LINK.from_wire),
        "tiers": repeated(_TIER.to_wire, _TIER.from_wire),
        "reloads": nested(_RELOADS.to_wire, _RELOADS.from_wire),
    },
)
_STATUS = MessageMapping(
    ClusterStatus,
    admin_pb2.StatusResponse,
    {
        "gateway": nested(_PROCESS.to_wire, _PROCESS.from_wire),
        "scheduler": nested(_PROCESS.to_wire, _PROCESS.from_wire, optional=True),
        "workers": repeated(_WORKER.to_wire, _WORKER.from_wire),
    },
)

to_status, from_status = _STATUS.to_wire, _STATUS.from_wire

_CACHE_USE = MessageMapping(TokenReuse, admin_pb2.CacheUse, {"cached_tokens": nested(dict, dict)})
_CACHE_STATS = MessageMapping(
    CacheStats,
    admin_pb2.CacheStatsResponse,
    {
        "total": nested(_CACHE_USE.to_wire, _CACHE_USE.from_wire),
        "workers": repeated(_CACHE_USE.to_wire, _CACHE_USE.from_wire),
    },
)

to_cache_stats, from_cache_stats = _CACHE_STATS.to_wire, _CACHE_STATS.from_wire

_EXPORTED_PREFIX = MessageMapping(ExportedPrefix, admin_pb2.ExportedPrefix)
_IMPORTED_PREFIX = MessageMapping(ImportedPrefix, admin_pb2.ImportCacheResponse)
to_import_response, from_import_response = _IMPORTED_PREFIX.to_wire, _IMPORTED_PREFIX.from_wire


def to_export_response(answer: ExportedPrefix | bytes) -> admin_pb2.ExportCacheResponse:
    """Convert a part of a file, or what describes it."""
    if isinstance(answer, bytes):
        return admin_pb2.ExportCacheResponse(part=answer)
    return admin_pb2.ExportCacheResponse(prefix=_EXPORTED_PREFIX.to_wire(answer))


def from_export_response(message: admin_pb2.ExportCacheResponse) -> ExportedPrefix | bytes:
    """Convert a part of a file, or what describes it."""
    return _EXPORTED_PREFIX.from_wire(message.prefix) if message.HasField("prefix") else message.part


def to_explain_response(records: tuple[DecisionRecord, ...]) -> admin_pb2.ExplainResponse:
    """Convert decision records to JSON-like structs, whose fields may change between releases."""
    message = admin_pb2.ExplainResponse()
    for record in records:
        message.decisions.add().update(to_plain(record))
    return message


def from_explain_response(message: admin_pb2.ExplainResponse) -> tuple[DecisionRecord, ...]:
    """Convert structs to decision records. Raises Refused if another release wrote them."""
    try:
        return tuple(from_plain(DecisionRecord, MessageToDict(decision)) for decision in message.decisions)
    except ValueError as error:
        raise invalid(f"the answer is from another release: {error}") from error
