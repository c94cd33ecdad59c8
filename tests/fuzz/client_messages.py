"""Fuzz target: messages of the public gRPC API. Each is refused with a typed error, or becomes a valid
request.

The first byte of an input chooses the message.
"""

from google.protobuf.message import DecodeError

from baton.core.errors import Refused
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.request_body import parse_request
from baton.rpc.gates.client_message import MAX_FIELDS, has_more_fields
from baton.rpc.mappers import client_mapper
from baton.v1 import admin_pb2, inference_pb2

_CONVERTERS = (
    (inference_pb2.GenerateRequest, client_mapper.from_generate_request),
    (inference_pb2.GenerateResponse, client_mapper.from_generate_response),
    (inference_pb2.Model, client_mapper.from_model),
    (admin_pb2.StatusResponse, client_mapper.from_status),
    (admin_pb2.ExplainResponse, client_mapper.from_explain_response),
)


def run_one(data: bytes) -> None:
    kind, raw = data[:1] or b"\0", data[1:]
    message_class, convert = _CONVERTERS[kind[0] % len(_CONVERTERS)]
    if has_more_fields(raw, MAX_FIELDS):
        return
    try:
        message = message_class.FromString(raw)
    except DecodeError:
        return
    try:
        value = convert(message)
        if message_class is inference_pb2.GenerateRequest:
            parse_request(Endpoint.COMPLETIONS, value, UnknownFields(is_strict=True))
    except Refused as refused:
        str(refused).encode()
