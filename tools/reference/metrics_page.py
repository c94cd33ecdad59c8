"""The metrics page: every Prometheus metric with its type, labels and meaning."""

import inspect

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from baton.gateway.live.metrics_page import UP, UP_LABELS, UP_MEANING
from baton.gateway.vllm_metrics import ALIASES, PHASES
from baton.runtime.observability import metrics
from baton.runtime.observability.metrics import GatewayMetrics
from baton.runtime.observability.vllm_names import KV_USAGE_NAMES
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = """
Every service serves these at `/metrics` of its admin port, in Prometheus's text format; a gateway also at `/metrics`
of its HTTP port. The names are stable within a release; renamed ones are listed in the changelog. Processes also
export the `process_*` metrics of the Prometheus client and `baton_build_info`.
"""
VLLM = """
With `--vllm-metric-names` a gateway repeats these under the names of vLLM, with the labels `model_name` and `engine`.
Requests, tokens and latencies are those of the gateway. The number of running and waiting sequences and the use of the
KV cache are those of the cluster: take the maximum over gateways, not the sum.
"""
VLLM_WORKER = """
A worker with the same setting repeats these, for autoscalers and routers that read each worker. Give a Prometheus that
also reads the gateways another job name for workers, so that sums do not count sequences twice.
"""
VLLM_OF_WORKERS = (
    ("`vllm:num_requests_running`", "`baton_running_seqs`"),
    ("`vllm:num_requests_waiting`", "`baton_waiting_seqs`"),
    ("`vllm:num_preemptions_total`", "`baton_preemptions_total`"),
    ("`vllm:spec_decode_num_draft_tokens_total`", "sum of `baton_draft_tokens_total` over drafters"),
    ("`vllm:spec_decode_num_accepted_tokens_total`", "sum of `baton_accepted_draft_tokens_total` over drafters"),
    *((code(name), "share of `baton_kv_blocks` that is neither free nor cached") for name in KV_USAGE_NAMES),
    (
        "`vllm:cache_config_info`",
        "always 1; the labels `block_size`, `cache_dtype` and `num_gpu_blocks` describe the cache",
    ),
)
COLUMNS = ("metric", "type", "labels", "meaning")


def metrics_page() -> str:
    """One section per class of metrics, in the order of the module."""
    parts = [paragraph(INTRODUCTION)]
    for name, kind in inspect.getmembers(metrics, inspect.isclass):
        if not name.endswith("Metrics"):
            continue
        registry = CollectorRegistry()
        rows = [
            (
                code(_exported(metric)),
                metric._type,
                ", ".join(code(label) for label in metric._labelnames),
                metric._documentation,
            )
            for metric in vars(kind(registry)).values()
            if isinstance(metric, MetricWrapperBase)
        ]
        title = f"{name.removesuffix('Metrics')} metrics"
        parts += [f"## {title}", table(COLUMNS, rows)]
    of_page = (code(UP), "gauge", ", ".join(code(label) for label in UP_LABELS), UP_MEANING)
    parts += ["## Metrics of `/metrics/cluster` alone", table(COLUMNS, [of_page])]
    parts += ["## Names of vLLM", paragraph(VLLM), table(("metric", "same as"), _vllm_names())]
    parts += [paragraph(VLLM_WORKER), table(("metric", "same as"), VLLM_OF_WORKERS)]
    return page("Metrics", *parts)


def _vllm_names() -> list[tuple[str, str]]:
    """Each alias with the metric that it repeats."""
    kinds = GatewayMetrics(CollectorRegistry())
    aliases = [(name, code(_exported(getattr(kinds, field)))) for name, field in ALIASES.items()]
    phases = [(name, f"{code(_exported(kinds.phase_s))}, phase {phase}") for name, phase in PHASES.items()]
    others = [
        ("vllm:num_requests_running", "sum of the workers' `baton_running_seqs`"),
        ("vllm:num_requests_waiting", "sum of the workers' `baton_waiting_seqs`"),
        *((name, "share of the workers' `baton_kv_blocks` that is neither free nor cached") for name in KV_USAGE_NAMES),
        (
            "vllm:request_success_total",
            "`baton_finished_samples_total`, tool calls as `stop`; cancelled requests as `abort`, those that failed "
            "with 5xx as `error`",
        ),
    ]
    suffix = {name: "_total" for name, field in ALIASES.items() if getattr(kinds, field)._type == "counter"}
    return [(code(name + suffix.get(name, "")), same) for name, same in (*aliases, *phases, *others)]


def _exported(metric: MetricWrapperBase) -> str:
    """The name as Prometheus shows it: counters end with `_total`."""
    return f"{metric._name}_total" if metric._type == "counter" else metric._name
