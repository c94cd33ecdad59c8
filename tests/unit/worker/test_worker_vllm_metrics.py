"""A worker's metrics under the names of vLLM."""

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.runtime.observability.metrics import EngineMetrics, expose
from baton.worker.worker_vllm_metrics import WorkerVllmMetrics
from tests import builders


def vllm_samples(registry: CollectorRegistry) -> dict[str, tuple[float, dict[str, str]]]:
    """Return (value, labels) of each sample of a metrics page by name."""
    families = text_string_to_metric_families(expose(registry).decode())
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    return {sample.name: (sample.value, sample.labels) for sample in samples}


def test_autoscaler_finds_the_queue_and_the_cache_of_one_worker() -> None:
    registry = CollectorRegistry()
    engine, layouts = EngineMetrics(registry), [None, builders.layout(block_size_tokens=16)]
    WorkerVllmMetrics("demo", engine, lambda: layouts[-1]).follow(registry)
    engine.running_seqs.set(3)
    engine.waiting_seqs.set(2)
    engine.preemptions.inc(5)
    for drafter, number, accepted in (("ngram", 5, 4), ("model", 3, 2)):
        engine.draft_tokens.labels(drafter).inc(number)
        engine.accepted_draft_tokens.labels(drafter).inc(accepted)
    for state, number in (("free", 40), ("used", 30), ("cached", 20), ("receiving", 10)):
        engine.blocks.labels("device", state).set(number)
    names = {"model_name": "demo", "engine": "0"}
    assert vllm_samples(registry) == {
        "vllm:num_requests_running": (3, names),
        "vllm:num_requests_waiting": (2, names),
        "vllm:num_preemptions_total": (5, names),
        "vllm:spec_decode_num_draft_tokens_total": (8, names),
        "vllm:spec_decode_num_accepted_tokens_total": (6, names),
        "vllm:kv_cache_usage_perc": (0.4, names),
        "vllm:gpu_cache_usage_perc": (0.4, names),
        "vllm:cache_config_info": (1, names | {"block_size": "16", "cache_dtype": "float32", "num_gpu_blocks": "100"}),
    }
    layouts.append(None)
    assert "vllm:cache_config_info" not in vllm_samples(registry)
