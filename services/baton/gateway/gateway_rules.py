"""Settings of a gateway, and the parts that are built from them alone."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from baton.core.interfaces import Network
from baton.core.request import NO_SLO, Slo
from baton.gateway.cluster.cluster_view import ClusterView
from baton.gateway.cluster.scheduler_pool import SchedulerPoolTimes
from baton.gateway.cluster.worker_session import SessionTimes
from baton.gateway.input.answers.answer_grammar import GrammarCheck
from baton.gateway.input.validation import Validator
from baton.gateway.output.format_choice import choose_format
from baton.gateway.output.formats import OutputFormat
from baton.gateway.request.failures.retry_rules import RetryRules
from baton.gateway.request.worker_sessions import WorkerSessions
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.logging import get_logger

log = get_logger(__name__)

STUCK_DETECTIONS = 24
"""A worker whose step runs for this many detection times counts as lost, although it still sends heartbeats.
Workers detect this earlier themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRules:
    """Settings of a gateway. Fields have the meaning of the settings of the same name."""

    gateway_id: str
    model: str
    heartbeat_s: float
    detection_s: float
    scheduler_wait_s: float
    request_timeout_s: float
    default_slo: Slo = NO_SLO
    max_open_requests: int
    max_attempts: int
    stream_buffer_bytes: int
    max_response_bytes: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    allow_request_chat_template: bool = False
    strict_fields: bool = False


def cluster_view(rules: GatewayRules, tokenizer: Tokenizer) -> ClusterView:
    return ClusterView(
        model=rules.model, tokenizer_fingerprint=tokenizer.fingerprint, model_max_len=tokenizer.max_model_len
    )


def worker_sessions(
    rules: GatewayRules, network: Network, tokenizer: Tokenizer, rng: Random, awake_clock: Callable[[], float] | None
) -> WorkerSessions:
    return WorkerSessions(
        network,
        gateway_id=rules.gateway_id,
        tokenizer_fingerprint=tokenizer.fingerprint,
        times=_session_times(rules),
        rng=rng,
        awake_clock=awake_clock,
    )


def validator(
    rules: GatewayRules, tokenizer: Tokenizer, view: ClusterView, rng: Random, grammar_check: GrammarCheck | None
) -> Validator:
    return Validator(
        tokenizer=tokenizer,
        model=rules.model,
        model_limits=lambda: view.model_limits,
        rng=rng,
        request_timeout_s=rules.request_timeout_s,
        default_slo=rules.default_slo,
        allow_request_chat_template=rules.allow_request_chat_template,
        strict_fields=rules.strict_fields,
        output_format=_output_format(rules, tokenizer),
        grammar_check=grammar_check,
    )


def _output_format(rules: GatewayRules, tokenizer: Tokenizer) -> OutputFormat:
    """Return the format of answers to chats, by the settings and the template for chats with tools.

    It is logged. Raises ModelError if a parser is unknown.
    """
    templates = tokenizer.chat_templates
    template = templates.chosen(has_tools=True) if templates else None
    chosen = choose_format(
        template.source if template else "",
        templates.response_template if templates else None,
        tool_parser=rules.tool_parser,
        reasoning_parser=rules.reasoning_parser,
    )
    names = {
        "tool_parser": chosen.tools.name if chosen.tools else "none",
        "reasoning_parser": chosen.reasoning.name if chosen.reasoning else "none",
        "has_response_template": chosen.template is not None,
    }
    is_unknown = chosen.tools is None and chosen.template is None and rules.tool_parser is None
    if template is not None and template.uses_tools and is_unknown:
        remedy = "calls stay text in the content; set --tool-parser, or --tool-parser none to silence this"
        log.warning("tool_format_unknown", **names, remedy=remedy)
    else:
        log.info("output_format_chosen", **names)
    return chosen


def scheduler_times(rules: GatewayRules) -> SchedulerPoolTimes:
    return SchedulerPoolTimes(heartbeat_s=rules.heartbeat_s, call_s=rules.detection_s, wait_s=rules.scheduler_wait_s)


def _session_times(rules: GatewayRules) -> SessionTimes:
    return SessionTimes(
        heartbeat_s=rules.heartbeat_s,
        detection_s=rules.detection_s,
        stuck_s=rules.detection_s * STUCK_DETECTIONS,
    )


def retry_rules(rules: GatewayRules) -> RetryRules:
    return RetryRules(
        max_attempts=rules.max_attempts,
        pause_s=rules.heartbeat_s / 20,
        max_pause_s=rules.detection_s,
        retry_placement_s=rules.heartbeat_s,
        dead_worker_s=2 * rules.detection_s,
    )
