"""Typical mistakes in values are refused by an error that names the value."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.deploy.renderer import Renderer, RenderError
from tests.deploy.value_sets import KUBERAY, D, P

MISTAKES: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "unknown value": ({"gatway": {}}, ("gatway",)),
    "unknown value of a service": ({"gateway": {"replica": 2}}, ("gateway", "replica")),
    "unknown setting": ({"gateway": {"config": {"max_open_request": 5}}}, ("gateway.config", "max_open_request")),
    "setting with dashes": ({"fleet": {"config": {"kv-memory": "1GiB"}}}, ("fleet.config", "kv-memory")),
    "setting of another service": (
        {"scheduler": {"config": {"max_body_bytes": 5}}},
        ("scheduler.config", "max_body_bytes"),
    ),
    "setting that the chart determines": (
        {"gateway": {"config": {"redis_url": "redis://x"}}},
        ("gateway.config", "redis_url"),
    ),
    "number of workers set by hand": ({"fleet": {"config": {"prefill": 2}}}, ("fleet.config", "prefill")),
    "number as text": ({"gateway": {"replicas": "2"}}, ("gateway.replicas", "integer")),
    "no replicas, with a budget": ({"gateway": {"replicas": 0}}, ("gateway.replicas", "1")),
    "no pods in a pool": ({"pools": [{**P, "replicas": 0}, D]}, ("pools.0.replicas", "1")),
    "a setting out of range": (
        {"fleet": {"config": {"block_size_tokens": 4096}}},
        ("fleet.config.block_size_tokens", "1,024"),
    ),
    "a setting of the wrong type": (
        {"scheduler": {"config": {"max_queued_requests": "many"}}},
        ("scheduler.config.max_queued_requests",),
    ),
    "an unknown policy": (
        {"scheduler": {"config": {"policy": "kv_centrc"}}},
        ("scheduler.config.policy", "kv_centric"),
    ),
    "a policy of a file": (
        {"scheduler": {"config": {"policy": "policies/most_free.py"}}},
        ("scheduler.config.policy",),
    ),
    "port 0": ({"gateway": {"config": {"http_port": 0}}}, ("gateway.config.http_port", "1")),
    "no port": ({"gateway": {"config": {"http_port": None}}}, ("http_port",)),
    "an invalid size": ({"poolDefaults": {"shmSize": "2 GB"}}, ("poolDefaults.shmSize",)),
    "an unknown mode": ({"runtime": {"mode": "ray"}}, ("runtime.mode", "kuberay")),
    "an unknown API level": ({"runtime": KUBERAY, "kuberay": {"apiLevel": "1.5"}}, ("kuberay.apiLevel", "1.6")),
    "an unknown role": ({"pools": [{"name": "a", "role": "prefil"}]}, ("pools.0.role", "prefill")),
    "a pool without a role": ({"pools": [{"name": "a"}]}, ("pools.0", "role")),
    "an invalid pool name": ({"pools": [{"name": "My_Pool", "role": "hybrid"}]}, ("pools.0.name",)),
    "no pools": ({"pools": []}, ("pools",)),
    "no decode pool": ({"pools": [P]}, ("pools", "decode")),
    "two pools of one name": (
        {"pools": [{"name": "a", "role": "prefill"}, {"name": "a", "role": "decode"}]},
        ("pools", '"a"'),
    ),
    "GPUs in the CPU image": ({"poolDefaults": {"gpu": {"count": 1}}}, ("pools: prefill", "image.variant", "cuda")),
    "more GPUs than a worker uses": ({"poolDefaults": {"gpu": {"count": 8}}}, ("poolDefaults.gpu.count", "1")),
    "GPUs in one pool only": (
        {"pools": [{**P, "gpu": {"count": 1}, "image": {"variant": "cuda"}}, D]},
        ("pools", "gpu.count"),
    ),
    "RDMA without a resource": ({"poolDefaults": {"rdma": {"enabled": True}}}, ("rdma.resource",)),
    "autoscaling without Prometheus": ({"gateway": {"autoscaling": {"enabled": True}}}, ("keda.prometheusAddress",)),
    "minReplicas above maxReplicas": (
        {
            "poolDefaults": {"autoscaling": {"enabled": True, "minReplicas": 9}},
            "keda": {"prometheusAddress": "http://p:9090"},
        },
        ("autoscaling.minReplicas",),
    ),
    "Ray's autoscaler": (
        {"runtime": KUBERAY, "poolDefaults": {"autoscaling": {"enabled": True}}},
        ("pools: prefill", "autoscaling.enabled", "kuberay", "maxReplicas at once", "replicas"),
    ),
    "TLS without certificates": ({"tls": {"enabled": True}}, ("tls.existingSecret", "certManager")),
    "front TLS without an issuer": (
        {"frontTls": {"enabled": True, "certManager": {"enabled": True}}},
        ("frontTls.certManager.issuerRef",),
    ),
    "a password in values": ({"redis": {"url": "redis://:secret@redis:6379/0"}}, ("redis.url",)),
    "a claim without a name": (
        {"model": {"source": "pvc"}, "config": {"model": "/models/a"}},
        ("model.pvc.claimName",),
    ),
    "a model outside of its claim": (
        {"model": {"source": "pvc", "pvc": {"claimName": "m"}}, "config": {"model": "/data/a"}},
        ("config.model", "/models"),
    ),
    "offline without a cache": ({"model": {"source": "hub", "hub": {"offline": True}}}, ("model.hub.claimName",)),
    "prefetch without a claim": (
        {"model": {"source": "hub", "hub": {"prefetch": True}}},
        ("model.hub.prefetch", "model.hub.claimName"),
    ),
    "fault tolerance without its Redis": (
        {"ray": {"gcsFaultTolerance": {"enabled": True}}},
        ("ray.gcsFaultTolerance.redisAddress",),
    ),
    "an Ingress without hosts": ({"gateway": {"ingress": {"enabled": True}}}, ("gateway.ingress.hosts",)),
    "a route without a parent": ({"gateway": {"httpRoute": {"enabled": True}}}, ("gateway.httpRoute.parentRefs",)),
    "a tag that moves": ({"image": {"tag": "latest"}}, ("image.tag",)),
    "an invalid digest": ({"image": {"digest": "sha256:abc"}}, ("image.digest",)),
    "KV ports in the wrong order": (
        {"fleet": {"config": {"kv_port_range": "200-100"}}},
        ("kv_port_range", "LOW-HIGH"),
    ),
    "an unknown resource field": (
        {"gateway": {"resources": {"limit": {"memory": "1Gi"}}}},
        ("gateway.resources", "limit"),
    ),
    "egress without rules for Ray's Redis": (
        {
            "networkPolicy": {"egress": {"enabled": True}},
            "ray": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "other:6379"}},
        },
        ("networkPolicy.egress.rules",),
    ),
    "egress without rules for an existing Redis": (
        {"networkPolicy": {"egress": {"enabled": True}}, "redis": {"url": "redis://other:6379/0"}},
        ("networkPolicy.egress.rules",),
    ),
    "an invalid peer": ({"networkPolicy": {"clients": [{"namespace": "a"}]}}, ("networkPolicy.clients.0",)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_values_is_refused_by_name(helm: Renderer, mistake: str) -> None:
    values, words = MISTAKES[mistake]
    with pytest.raises(RenderError) as refused:
        helm.text(values)

    assert [word for word in words if not refused.value.mentions(word)] == [], refused.value
