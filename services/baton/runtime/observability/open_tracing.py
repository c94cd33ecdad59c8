"""Creates the tracing that the settings ask for. Loads OpenTelemetry only if a collector is configured."""

from baton.runtime.config.settings import TracingSettings
from baton.runtime.observability.metrics import ProcessMetrics
from baton.runtime.observability.tracing import NOTHING, OFF, Attributes, Tracing


def open_tracing(
    settings: TracingSettings, metrics: ProcessMetrics, service: str, instance: str, attributes: Attributes = NOTHING
) -> Tracing:
    """What the settings ask for. `instance` tells processes of one service apart; `attributes` are the
    process's; `metrics` count its spans. Nobody need be there to take the spans. Raises ConfigError where the
    endpoint cannot be used."""
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
