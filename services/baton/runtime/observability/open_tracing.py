"""Creates tracing from the settings; loads OpenTelemetry only if a collector is configured."""

from baton.runtime.config.shared_settings import TracingSettings
from baton.runtime.observability.metrics import ProcessMetrics
from baton.runtime.observability.tracing import NOTHING, OFF, Attributes, Tracing


def open_tracing(
    settings: TracingSettings, metrics: ProcessMetrics, service: str, instance: str, attributes: Attributes = NOTHING
) -> Tracing:
    """Return the tracing that the settings select, or `OFF` if no collector is configured.

    metrics: its span counter is updated.
    service, instance: name of the service, and an id that distinguishes its processes.
    attributes: attributes of the process, attached to all spans.

    The collector need not be reachable. Raises ConfigError if the endpoint is invalid.
    """
    if settings.otlp_endpoint is None:
        return OFF
    from baton.runtime.observability.otlp import OtlpTracing  # loads OpenTelemetry

    return OtlpTracing(
        settings.otlp_endpoint,
        settings.trace_sample,
        metrics.trace_spans,
        service=service,
        instance=instance,
        attributes=attributes,
    )
