"""Sets of values for rendering the chart: its examples, and one set per switch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.renderer import CHART


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSet:
    """One set of values.

    example: name of an example file of the chart. `values` take precedence.
    external: names of Secrets and claims that the values expect to exist.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    example: str = ""
    external: frozenset[str] = frozenset()

    @property
    def files(self) -> tuple[Path, ...]:
        return (CHART / f"values-{self.example}.yaml",) if self.example else ()


def _pool(role: str, **more: Any) -> dict[str, Any]:
    return {"name": role, "role": role, **more}


P, D = _pool("prefill"), _pool("decode")
SCALED = {"enabled": True, "minReplicas": 2, "maxReplicas": 6}
PROMETHEUS = {"prometheusAddress": "http://prometheus.monitoring:9090"}
GPU = {"image": {"variant": "cuda"}, "gpu": {"count": 1}}
RDMA = {"rdma": {"enabled": True, "resource": "rdma/hca"}}
KUBERAY = {"mode": "kuberay"}
IN_8P8D = frozenset({"baton-redis", "baton-ray-redis", "baton-keys", "models", "registry"})
ROUTE = {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["llm.example.com"]}
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "somewhere"}}}

OUTSIDE = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"protocol": "TCP", "port": 4317}]}

ALL_ON: dict[str, Any] = {
    "commonLabels": {"team": "serving"},
    "image": {"registry": "registry.example.com", "pullSecrets": ["registry"]},
    "config": {"served_model_name": "served", "model": "/models/some"},
    "model": {"source": "pvc", "pvc": {"claimName": "models", "subPath": "some"}},
    "tls": {"enabled": True, "certManager": {"enabled": True}},
    "frontTls": {
        "enabled": True,
        "dnsNames": ["llm.example.com"],
        "certManager": {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "public"}},
    },
    "ray": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "ray-redis:6379", "existingSecret": "ray-redis"}},
    "gateway": {
        "config": {"slo": "ttft=1s,tpot=50ms"},
        "service": {
            "type": "LoadBalancer",
            "annotations": {"some": "annotation"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
        },
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["llm.example.com"],
            "tls": [{"hosts": ["llm.example.com"], "secretName": "web"}],
        },
        "httpRoute": ROUTE,
        "grpcRoute": ROUTE,
        "autoscaling": SCALED,
        "podAnnotations": {"some": "annotation"},
        "podLabels": {"some": "label"},
        "priorityClassName": "high",
        "extraEnv": [{"name": "SOME", "value": "thing"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "scheduler": {"replicas": 3, "config": {"admission": "predictive", "policy": "my_policies.most_free:most_free"}},
    "pools": [
        _pool("prefill", autoscaling=SCALED, **GPU, **RDMA),
        _pool("decode", autoscaling=SCALED, **GPU, **RDMA),
        _pool("hybrid", replicas=2, nodeSelector={"disk": "fast"}, **GPU),
    ],
    "poolDefaults": {"colocateBy": "topology.kubernetes.io/zone"},
    "networkPolicy": {"clients": [PEER], "metricsFrom": [PEER]},
    "metrics": {
        name: {"enabled": True, "labels": {"prometheus": "main"}}
        for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    },
    "keda": PROMETHEUS,
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-more", "namespace": "{{ .Release.Namespace }}"},
        }
    ],
}
FIXED_POOLS = [{name: value for name, value in pool.items() if name != "autoscaling"} for pool in ALL_ON["pools"]]
IN_ALL_ON = frozenset({"registry", "models", "ray-redis", "web"})

SETS: Mapping[str, ValueSet] = {
    "default": ValueSet(),
    "laptop": ValueSet(example="laptop"),
    "gpu-node": ValueSet(example="gpu-node", external=frozenset({"models"})),
    "8p8d-rdma": ValueSet(example="8p8d-rdma", external=IN_8P8D),
    "all-on": ValueSet(values=ALL_ON, external=IN_ALL_ON),
    "kuberay": ValueSet(values={"runtime": KUBERAY}),
    "kuberay-8p8d": ValueSet(example="8p8d-rdma", values={"runtime": KUBERAY}, external=IN_8P8D),
    "kuberay-1.6": ValueSet(values={"runtime": KUBERAY, "kuberay": {"apiLevel": "1.6"}}),
    "kuberay-all-on": ValueSet(values={**ALL_ON, "runtime": KUBERAY, "pools": FIXED_POOLS}, external=IN_ALL_ON),
    "redis-url": ValueSet(values={"redis": {"url": "redis://redis.data:6379/0"}}),
    "redis-secret": ValueSet(values={"redis": {"existingSecret": "mine"}}, external=frozenset({"mine"})),
    "redis-image": ValueSet(
        values={
            "redis": {
                "bundled": {
                    "image": {"repository": "redis", "tag": "7.4-alpine"},
                    "command": "redis-server",
                    "existingSecret": "mine",
                }
            }
        },
        external=frozenset({"mine"}),
    ),
    "no-keys": ValueSet(values={"apiKeys": {"enabled": False}}),
    "own-secrets": ValueSet(
        values={"apiKeys": {"existingSecret": "keys"}, "ray": {"existingSecret": "token"}},
        external=frozenset({"keys", "token"}),
    ),
    "tls-secret": ValueSet(values={"tls": {"enabled": True, "existingSecret": "mtls"}}, external=frozenset({"mtls"})),
    "tls-issuer": ValueSet(
        values={
            "tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"kind": "Issuer", "name": "mine"}}}
        },
    ),
    "front-tls": ValueSet(
        values={"frontTls": {"enabled": True, "existingSecret": "front"}}, external=frozenset({"front"})
    ),
    "front-issuer": ValueSet(
        values={
            "frontTls": {
                "enabled": True,
                "certManager": {"enabled": True, "issuerRef": {"kind": "Issuer", "name": "mine"}},
            }
        }
    ),
    "hub": ValueSet(values={"config": {"model": "Qwen/Qwen3-0.6B"}, "model": {"source": "hub"}}),
    "hub-claim": ValueSet(
        values={
            "config": {"model": "o/m"},
            "model": {
                "source": "hub",
                "hub": {"claimName": "cache", "offline": True, "existingSecret": "hf", "prefetch": True},
            },
        },
        external=frozenset({"cache", "hf"}),
    ),
    "hybrid": ValueSet(values={"pools": [_pool("hybrid", replicas=3)]}),
    "two-kinds": ValueSet(
        values={
            "pools": [P, {"name": "decode-a", "role": "decode", "replicas": 2}, {"name": "decode-b", "role": "decode"}],
            "poolDefaults": GPU,
        }
    ),
    "scaled-gateway": ValueSet(values={"gateway": {"autoscaling": SCALED}, "keda": PROMETHEUS}),
    "scaled-pools": ValueSet(values={"poolDefaults": {"autoscaling": SCALED}, "keda": PROMETHEUS}),
    "ingress": ValueSet(values={"gateway": {"ingress": {"enabled": True, "hosts": ["llm.example.com"]}}}),
    "routes": ValueSet(values={"gateway": {"httpRoute": ROUTE, "grpcRoute": ROUTE}}),
    "load-balancer": ValueSet(values={"gateway": {"service": {"type": "LoadBalancer"}}}),
    "no-policies": ValueSet(values={"networkPolicy": {"enabled": False}}),
    "clients": ValueSet(values={"networkPolicy": {"clients": [PEER], "metricsFrom": [PEER]}}),
    "egress": ValueSet(values={"networkPolicy": {"egress": {"enabled": True, "rules": [OUTSIDE]}}}),
    "no-accounts": ValueSet(values={"serviceAccounts": {"create": False}}),
    "no-spread": ValueSet(values={"topologySpread": {"enabled": False}}),
    "no-pdb": ValueSet(values={name: {"pdb": {"enabled": False}} for name in ("gateway", "scheduler", "poolDefaults")}),
    "slow-models": ValueSet(
        values={
            "pools": [
                {**P, "modelLoadSeconds": 1800},
                {**D, "modelLoadSeconds": 1200},
                _pool("hybrid", modelLoadSeconds=600),
            ]
        }
    ),
    "monitors": ValueSet(values={"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}),
    "long-name": ValueSet(
        values={
            "fullnameOverride": "a-name-that-is-longer-than-anybody-wants",
            "pools": [P, {"name": "the-decode-pool", "role": "decode"}],
        }
    ),
    "digest": ValueSet(values={"image": {"digest": "sha256:" + "0" * 64, "registry": "registry.example.com:5000"}}),
    "ray-ft": ValueSet(values={"ray": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "other:6379"}}}),
    "part-seconds": ValueSet(
        values={"gateway": {"config": {"drain_s": 2.5}}, "fleet": {"config": {"drain_s": 90, "lease_s": 12.25}}}
    ),
    "ipv6": ValueSet(values={"config": {"host": "::"}}),
    "collective": ValueSet(values={"fleet": {"config": {"transfer": "collective"}}}),
    "auto-transfer": ValueSet(values={"fleet": {"config": {"transfer": "auto"}}}),
    "ports": ValueSet(
        values={
            "gateway": {"config": {"http_port": 80, "grpc_port": 81, "admin_port": 82}},
            "worker": {"config": {"admin_port": 83}},
            "fleet": {"config": {"kv_port_range": "30000-30009", "admin_port": 84}},
        }
    ),
}
EXAMPLES = ("laptop", "gpu-node", "8p8d-rdma")
GOLDENS = {"minimal": "default", "gpu-rdma": "8p8d-rdma", "kuberay": "kuberay-8p8d", "all-on": "all-on"}
