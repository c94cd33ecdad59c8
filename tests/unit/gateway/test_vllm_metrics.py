"""Metrics under the names of vLLM: the gateway's own numbers, and those of the workers."""

from dataclasses import replace

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.core.request import FinishReason
from baton.gateway.vllm_metrics import ALIASES, PHASES, VllmMetrics
from baton.runtime.observability.metrics import expose
from tests.unit.gateway.fakes import cluster
from tests.unit.gateway.virtual import virtual


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Return the samples of a metrics page by name, without buckets; each must have the model's name."""
    found = {}
    for family in text_string_to_metric_families(expose(registry).decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and "le" not in sample.labels:
                assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == ("demo", "0")
                found["/".join([sample.name, *sample.labels.values()])] = sample.value
    return found


@virtual
async def test_gateway_counts_under_the_names_of_vllm() -> None:
    async with cluster(("h0", "hybrid")) as c:
        VllmMetrics("demo", c.gateway.metrics, lambda: c.gateway.view.reports).follow(c.registry)
        c.scheduler.workers[0].finish_at = 5
        await c.complete("hello", n=2, max_tokens=8)
        c.scheduler.workers[0].finish_at = None
        await c.complete("hello", max_tokens=3)
        found = values(c.registry)
        assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == 10
        own = {family.name: family for family in c.registry.collect()}
        assert found["vllm:prefix_cache_hits_total"] == own["baton_cached_tokens"].samples[0].value
        assert found["vllm:generation_tokens_total"] == own["baton_output_tokens"].samples[0].value
        assert found["vllm:request_success_total/stop"] == 2
        assert found["vllm:request_success_total/length"] == 1
        assert found["vllm:request_success_total/abort"] == found["vllm:request_success_total/error"] == 0
        assert found["vllm:request_prompt_tokens_sum"] == 10
        assert found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"]
        assert found["vllm:request_params_max_tokens_sum"] == 8 + 3
        assert found["vllm:request_max_num_generation_tokens_sum"] == 5 + 3
        assert found["vllm:request_params_n_sum"] == 2 + 1
        for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
            assert found[f"{name}_count"] == 2
            assert found[f"{name}_sum"] > 0
        for name in (*ALIASES, *PHASES):
            assert any(each.startswith(name) for each in found), name


@virtual
async def test_ends_of_samples_have_the_reasons_of_vllm() -> None:
    async with cluster(("h0", "hybrid")) as c:
        metrics = c.gateway.metrics
        VllmMetrics("demo", metrics, lambda: ()).follow(c.registry)
        for reason, number in ((FinishReason.STOP, 1), (FinishReason.TOOL_CALLS, 2), (FinishReason.LENGTH, 4)):
            metrics.finished_samples.labels(reason.value).inc(number)
        for code, number in ((499, 8), (503, 16), (500, 32), (400, 64), (200, 128)):
            metrics.requests.labels("chat", str(code), "").inc(number)
        name = "vllm:request_success_total"
        found = {key.partition("/")[2]: value for key, value in values(c.registry).items() if key.startswith(name)}
        assert found == {"stop": 3, "length": 4, "abort": 8, "error": 48}


@virtual
async def test_gauges_add_up_the_workers() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        reports = [
            replace(
                worker.report,
                running_seqs=3,
                waiting_seqs=2,
                blocks=replace(
                    worker.report.blocks, total=100, free=40, cached=20, used=40, receiving=0, quarantined=0
                ),
            )
            for worker in c.scheduler.workers
        ]
        VllmMetrics("demo", c.gateway.metrics, lambda: reports).follow(c.registry)
        found = values(c.registry)
        assert found["vllm:num_requests_running"] == 6
        assert found["vllm:num_requests_waiting"] == 4
        assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.4
        reports.clear()
        assert values(c.registry)["vllm:kv_cache_usage_perc"] == 0
