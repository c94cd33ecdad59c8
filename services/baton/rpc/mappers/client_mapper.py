"""What clients and operators send and get, between `core.client_api` and baton.v1.

A GenerateRequest becomes the dict that a JSON body of `/v1/completions` would be: only what the client set,
nothing checked but what a dict cannot say. The gateway's validator does the rest, for both front doors.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict

from baton.core.client_api import (
    ChoiceDelta,
    ClusterStatus,
    GenerateChunk,
    ModelInfo,
    ProcessInfo,
    Timeline,
    TotalUsage,
    WorkerStatus,
)
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.worker_report import BlockCounts, LinkReport, WorkerRole, WorkerState
from baton.core.errors import invalid
from baton.core.ids import WorkerRef
from baton.core.plain_json import from_plain, to_plain
from baton.core.request import FinishReason, LegTimeline, TokenLogprobs
from baton.rpc.mappers.common_mapper import EnumMap, values_of
from baton.v1 import admin_pb2, inference_pb2

FINISH_REASONS = EnumMap(FinishReason, inference_pb2.FinishReason)
ROLES = EnumMap(WorkerRole, admin_pb2.WorkerRole)
STATES = EnumMap(WorkerState, admin_pb2.WorkerState)

_SCALARS = (
    "model",
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
)
_LISTS = ("stop", "stop_token_ids")
_SLO = ("ttft_ms", "tpot_ms")
_ALWAYS = {"stream": True, "return_token_ids": True}
"""What every call over gRPC asks for by being one."""


def from_generate_request(message: inference_pb2.GenerateRequest) -> dict[str, Any]:
    body = {**_set_fields(message, _SCALARS), **_ALWAYS}
    body |= {field: list(value) for field in _LISTS if (value := getattr(message, field))}
    if message.HasField("prompt"):
        body["prompt"] = message.prompt
    if message.token_ids:
        if "prompt" in body:
            raise invalid("both prompt and token_ids are set; send one of them")
        body["prompt"] = list(message.token_ids)
    if message.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in message.logit_bias.items()}
    if message.HasField("slo"):
        body["slo"] = _set_fields(message.slo, _SLO)
    return body


def to_generate_request(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """The inverse, for our own clients. Raises TypeError or ValueError for what is no field or no value of
    one."""
    fields = {name: value for name, value in body.items() if name not in _ALWAYS}
    prompt = fields.pop("prompt", None)
    if prompt is not None:
        fields["prompt" if isinstance(prompt, str) else "token_ids"] = prompt
    if (biases := fields.pop("logit_bias", None)) is not None:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    if (slo := fields.pop("slo", None)) is not None:
        fields["slo"] = inference_pb2.Slo(**slo)
    return inference_pb2.GenerateRequest(**fields)


def _set_fields(message: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def to_generate_response(chunk: GenerateChunk) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse()
    for choice in chunk.choices:
        out = message.choices.add(index=choice.index, text=choice.text, token_ids=choice.token_ids)
        for logprobs in choice.logprobs:
            top = out.logprobs.add(logprob=logprobs.logprob).top
            for token_id, logprob in logprobs.top:
                top.add(token_id=token_id, logprob=logprob)
        if choice.finish is not None:
            out.finish_reason = FINISH_REASONS.to_wire(choice.finish)
    if chunk.usage is not None:
        usage = chunk.usage
        message.usage.prompt_tokens = usage.num_prompt_tokens
        message.usage.completion_tokens = usage.num_output_tokens
        message.usage.total_tokens = usage.num_prompt_tokens + usage.num_output_tokens
        message.usage.cached_tokens = usage.num_cached_tokens
    if chunk.timeline is not None:
        message.timeline.CopyFrom(_to_timeline(chunk.timeline))
    return message


def from_generate_response(message: inference_pb2.GenerateResponse) -> GenerateChunk:
    usage = message.usage
    return GenerateChunk(
        choices=tuple(
            ChoiceDelta(
                index=choice.index,
                text=choice.text,
                token_ids=tuple(choice.token_ids),
                logprobs=tuple(
                    TokenLogprobs(logprob=each.logprob, top=tuple((top.token_id, top.logprob) for top in each.top))
                    for each in choice.logprobs
                ),
                finish=FINISH_REASONS.from_wire(choice.finish_reason) if choice.HasField("finish_reason") else None,
            )
            for choice in message.choices
        ),
        usage=TotalUsage(
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
            num_cached_tokens=usage.cached_tokens,
        )
        if message.HasField("usage")
        else None,
        timeline=_from_timeline(message.timeline) if message.HasField("timeline") else None,
    )


_LEG_FIELDS = tuple(field.name for field in inference_pb2.LegTimeline.DESCRIPTOR.fields)
_LAST_ATTEMPT = ("waiting_s", "predicted_ttft_s", "predicted_tpot_s")


def _to_timeline(timeline: Timeline) -> inference_pb2.Timeline:
    return inference_pb2.Timeline(
        request_id=timeline.request_id,
        attempts=timeline.attempts,
        policy=timeline.policy,
        placed_s=timeline.placed_s,
        ttft_s=timeline.ttft_s,
        tpot_s=timeline.tpot_s,
        total_s=timeline.total_s,
        cached_tokens_by_tier=dict(timeline.cached_tokens_by_tier),
        **{name: getattr(timeline, name) for name in _LAST_ATTEMPT},
        legs=[
            inference_pb2.LegTimeline(**{field: getattr(leg, field) for field in _LEG_FIELDS}) for leg in timeline.legs
        ],
    )


def _from_timeline(message: inference_pb2.Timeline) -> Timeline:
    return Timeline(
        request_id=message.request_id,
        attempts=message.attempts,
        policy=message.policy,
        placed_s=message.placed_s,
        ttft_s=message.ttft_s if message.HasField("ttft_s") else None,
        tpot_s=message.tpot_s if message.HasField("tpot_s") else None,
        total_s=message.total_s,
        cached_tokens_by_tier=dict(message.cached_tokens_by_tier),
        **_set_fields(message, _LAST_ATTEMPT),
        legs=tuple(LegTimeline(**values_of(leg)) for leg in message.legs),
    )


def to_model(model: ModelInfo) -> inference_pb2.Model:
    return inference_pb2.Model(id=model.model_id, max_model_len=model.max_model_len)


def from_model(message: inference_pb2.Model) -> ModelInfo:
    return ModelInfo(
        model_id=message.id, max_model_len=message.max_model_len if message.HasField("max_model_len") else None
    )


def to_status(status: ClusterStatus) -> admin_pb2.StatusResponse:
    return admin_pb2.StatusResponse(
        version=status.version,
        model=status.model,
        gateway=_to_process(status.gateway),
        scheduler=None if status.scheduler is None else _to_process(status.scheduler),
        workers=[_to_worker_status(worker) for worker in status.workers],
        open_requests=status.open_requests,
    )


def from_status(message: admin_pb2.StatusResponse) -> ClusterStatus:
    return ClusterStatus(
        version=message.version,
        model=message.model,
        gateway=_from_process(message.gateway),
        scheduler=_from_process(message.scheduler) if message.HasField("scheduler") else None,
        workers=tuple(_from_worker_status(worker) for worker in message.workers),
        open_requests=message.open_requests,
    )


def _to_process(process: ProcessInfo) -> admin_pb2.Process:
    return admin_pb2.Process(id=process.process_id, pid=process.pid, host=process.host, address=process.address)


def _from_process(message: admin_pb2.Process) -> ProcessInfo:
    return ProcessInfo(process_id=message.id, pid=message.pid, host=message.host, address=message.address)


def _to_worker_id(ref: WorkerRef) -> admin_pb2.WorkerId:
    return admin_pb2.WorkerId(worker_id=ref.worker_id, worker_epoch=ref.worker_epoch, address=ref.address)


def _from_worker_id(message: admin_pb2.WorkerId) -> WorkerRef:
    return WorkerRef(worker_id=message.worker_id, worker_epoch=message.worker_epoch, address=message.address)


_BLOCK_FIELDS = {
    field.name: "receiving" if field.name == "landing" else field.name
    for field in admin_pb2.BlockCounts.DESCRIPTOR.fields
}
"""Field of `baton.v1.BlockCounts` to field of `core`. The public API keeps the name `landing`."""


def _to_worker_status(status: WorkerStatus) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        worker=_to_worker_id(status.worker),
        host=status.host,
        pid=status.pid,
        role=ROLES.to_wire(status.role),
        state=STATES.to_wire(status.state),
        model=status.model,
        blocks=admin_pb2.BlockCounts(**{public: getattr(status.blocks, own) for public, own in _BLOCK_FIELDS.items()}),
        block_size_tokens=status.block_size_tokens,
        block_bytes=status.block_bytes,
        waiting_seqs=status.waiting_seqs,
        waiting_prefill_tokens=status.waiting_prefill_tokens,
        running_seqs=status.running_seqs,
        running_context_tokens=status.running_context_tokens,
        open_leases=status.open_leases,
        links=[
            admin_pb2.Link(
                peer=_to_worker_id(link.peer),
                bytes_per_s=link.bytes_per_s,
                inflight_bytes=link.inflight_bytes,
                broken=link.broken,
                transport=link.transport,
            )
            for link in status.links
        ],
    )


def _from_worker_status(message: admin_pb2.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker=_from_worker_id(message.worker),
        host=message.host,
        pid=message.pid,
        role=ROLES.from_wire(message.role),
        state=STATES.from_wire(message.state),
        model=message.model,
        blocks=BlockCounts(**{own: getattr(message.blocks, public) for public, own in _BLOCK_FIELDS.items()}),
        block_size_tokens=message.block_size_tokens,
        block_bytes=message.block_bytes,
        waiting_seqs=message.waiting_seqs,
        waiting_prefill_tokens=message.waiting_prefill_tokens,
        running_seqs=message.running_seqs,
        running_context_tokens=message.running_context_tokens,
        open_leases=message.open_leases,
        links=tuple(
            LinkReport(
                peer=_from_worker_id(link.peer),
                bytes_per_s=link.bytes_per_s,
                inflight_bytes=link.inflight_bytes,
                broken=link.broken,
                transport=link.transport,
            )
            for link in message.links
        ),
    )


def to_explain_response(records: tuple[DecisionRecord, ...]) -> admin_pb2.ExplainResponse:
    message = admin_pb2.ExplainResponse()
    for record in records:
        message.decisions.add().update(to_plain(record))
    return message


def from_explain_response(message: admin_pb2.ExplainResponse) -> tuple[DecisionRecord, ...]:
    try:
        return tuple(from_plain(DecisionRecord, MessageToDict(decision)) for decision in message.decisions)
    except ValueError as error:
        raise invalid(f"the answer is of another release: {error}") from error
