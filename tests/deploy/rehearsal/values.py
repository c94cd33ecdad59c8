"""Values of the rehearsal: two replicas of everything possible, TLS on all connections, and API keys."""

from typing import Any

from tests.deploy.renderer import NAMESPACE

RAY_REDIS = "ray-redis"
RAY_REDIS_PASSWORD = "a-password-of-ray-s-own"
_LABELS = {"app.kubernetes.io/name": RAY_REDIS, "app.kubernetes.io/component": RAY_REDIS}
_COMMAND = (
    """umask 077; printf 'requirepass "%s"\\n' "$PASSWORD" > /tmp/own.conf; """
    """exec valkey-server /tmp/own.conf --dir /tmp --save ''"""
)

RAY_REDIS_OBJECTS: tuple[dict[str, Any], ...] = (
    {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": RAY_REDIS, "namespace": NAMESPACE},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _LABELS},
            "template": {
                "metadata": {"labels": _LABELS},
                "spec": {
                    "terminationGracePeriodSeconds": 10,
                    "securityContext": {"runAsUser": 10001, "fsGroup": 10001},
                    "containers": [
                        {
                            "name": "redis",
                            "command": ["sh", "-c", _COMMAND],
                            "env": [
                                {
                                    "name": "PASSWORD",
                                    "valueFrom": {"secretKeyRef": {"name": RAY_REDIS, "key": "password"}},
                                }
                            ],
                            "ports": [{"name": "redis", "containerPort": 6379}],
                            "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 1},
                            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                        }
                    ],
                    "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
                },
            },
        },
    },
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": RAY_REDIS, "namespace": NAMESPACE},
        "spec": {"selector": _LABELS, "ports": [{"name": "redis", "port": 6379, "targetPort": "redis"}]},
    },
    {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": RAY_REDIS, "namespace": NAMESPACE},
        "stringData": {"password": RAY_REDIS_PASSWORD},
    },
)
"""The external Redis that stores the state of Ray's head."""

VALUES: dict[str, Any] = {
    "tls": {"enabled": True, "certManager": {"enabled": True}},
    "frontTls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"kind": "Issuer", "name": "front"}}},
    "ray": {
        "gcsFaultTolerance": {"enabled": True, "redisAddress": f"{RAY_REDIS}:6379", "existingSecret": RAY_REDIS},
    },
    "gateway": {"replicas": 2},
    "scheduler": {"replicas": 2},
    "fleet": {"config": {"kv_memory": "64MiB"}},
    "pools": [
        {"name": "prefill", "role": "prefill", "replicas": 2},
        {"name": "decode", "role": "decode", "replicas": 2},
    ],
    "extraObjects": list(RAY_REDIS_OBJECTS),
}
