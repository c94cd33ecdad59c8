"""Strict schemas of the custom kinds. They allow only the fields that the chart emits.

They follow the published references: KubeRay 1.3 and 1.6, KEDA 2.17, Prometheus operator 0.85, Gateway API
    1.3, cert-manager 1.18.
"""

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NAMES: Schema = {"type": "array", "minItems": 1, "items": TEXT}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(h|m|s|ms))+$"}
HOSTS: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": 16,
    "items": {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def _object(required: str, optional: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object. Fields without a schema in `properties` are strings."""
    names = [*required.split(), *optional.split()]
    shapes = {name: properties.get(name, TEXT) for name in names}
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": shapes}


def _list(item: Schema, **more: Any) -> Schema:
    return {"type": "array", "minItems": 1, "items": item, **more}


def _kind(api: str, kind: str, spec: Schema) -> Schema:
    metadata = _object("name namespace labels", "annotations", labels=TEXTS, annotations=TEXTS)
    return _object(
        "apiVersion kind metadata spec", apiVersion={"const": api}, kind={"const": kind}, metadata=metadata, spec=spec
    )


SECRET_KEY = _object("secretKeyRef", secretKeyRef=_object("name key"))
POD_TEMPLATE: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["metadata", "spec"],
    "properties": {"metadata": {}, "spec": {}},
}
"""Checked with Kubernetes' own schema."""
RAY_GROUP = {"rayStartParams": TEXTS, "template": POD_TEMPLATE}
ISSUER = _object("name", "kind group", kind={"enum": ["Issuer", "ClusterIssuer"]})
PARENTS = _list(_object("name", "group kind namespace sectionName port", port=PORT), maxItems=32)
BACKENDS = _list(_object("name port", port=PORT))
MATCH = _object("matchLabels", matchLabels=TEXTS)
ENDPOINTS = _list(_object("port path interval", interval=DURATION))
RULE: Schema = {
    "anyOf": [
        _object(
            "alert expr", "for keep_firing_for labels annotations", labels=TEXTS, annotations=TEXTS, **{"for": DURATION}
        ),
        _object("record expr", "labels", labels=TEXTS),
    ]
}

SCHEMAS: Mapping[tuple[str, str], Schema] = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): schema
    for schema in (
        _kind(
            "ray.io/v1",
            "RayCluster",
            _object(
                "rayVersion enableInTreeAutoscaling headGroupSpec workerGroupSpecs",
                "authOptions gcsFaultToleranceOptions",
                rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                enableInTreeAutoscaling=FLAG,
                authOptions=_object("mode secretName", mode={"enum": ["disabled", "token"]}),
                gcsFaultToleranceOptions=_object(
                    "redisAddress externalStorageNamespace",
                    "redisPassword",
                    redisPassword=_object("valueFrom", valueFrom=SECRET_KEY),
                ),
                headGroupSpec=_object("rayStartParams template", **RAY_GROUP),
                workerGroupSpecs=_list(
                    _object(
                        "groupName replicas minReplicas maxReplicas rayStartParams template",
                        replicas=NUMBER,
                        minReplicas=NUMBER,
                        maxReplicas=NUMBER,
                        **RAY_GROUP,
                    )
                ),
            ),
        ),
        _kind(
            "keda.sh/v1alpha1",
            "ScaledObject",
            _object(
                "scaleTargetRef minReplicaCount maxReplicaCount pollingInterval advanced triggers",
                scaleTargetRef=_object("apiVersion kind name", kind={"const": "Deployment"}),
                minReplicaCount=NUMBER,
                maxReplicaCount=NUMBER,
                pollingInterval=NUMBER,
                advanced=_object(
                    "horizontalPodAutoscalerConfig",
                    horizontalPodAutoscalerConfig=_object(
                        "behavior",
                        behavior=_object(
                            "scaleDown",
                            scaleDown=_object(
                                "stabilizationWindowSeconds policies",
                                stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
                                policies=_list(_object("type value periodSeconds", value=NUMBER, periodSeconds=NUMBER)),
                            ),
                        ),
                    ),
                ),
                triggers=_list(
                    _object(
                        "type metricType metadata",
                        type={"const": "prometheus"},
                        metricType={"enum": ["AverageValue", "Value"]},
                        metadata=_object(
                            "serverAddress query threshold", threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"}
                        ),
                    )
                ),
            ),
        ),
        _kind(
            "monitoring.coreos.com/v1",
            "ServiceMonitor",
            _object("selector endpoints", selector=MATCH, endpoints=ENDPOINTS),
        ),
        _kind(
            "monitoring.coreos.com/v1",
            "PodMonitor",
            _object(
                "selector podMetricsEndpoints",
                "podTargetLabels",
                selector=MATCH,
                podMetricsEndpoints=ENDPOINTS,
                podTargetLabels=NAMES,
            ),
        ),
        _kind(
            "monitoring.coreos.com/v1",
            "PrometheusRule",
            _object("groups", groups=_list(_object("name rules", "interval", rules=_list(RULE), interval=DURATION))),
        ),
        _kind(
            "gateway.networking.k8s.io/v1",
            "HTTPRoute",
            _object(
                "parentRefs rules",
                "hostnames",
                parentRefs=PARENTS,
                hostnames=HOSTS,
                rules=_list(
                    _object(
                        "matches timeouts backendRefs",
                        matches=_list(
                            _object("path", path=_object("type value", type={"enum": ["Exact", "PathPrefix"]}))
                        ),
                        timeouts=_object("request", request=DURATION),
                        backendRefs=BACKENDS,
                    )
                ),
            ),
        ),
        _kind(
            "gateway.networking.k8s.io/v1",
            "GRPCRoute",
            _object(
                "parentRefs rules",
                "hostnames",
                parentRefs=PARENTS,
                hostnames=HOSTS,
                rules=_list(_object("backendRefs", backendRefs=BACKENDS)),
            ),
        ),
        _kind(
            "cert-manager.io/v1",
            "Certificate",
            _object(
                "secretName issuerRef privateKey duration",
                "isCA commonName dnsNames usages renewBefore",
                issuerRef=ISSUER,
                isCA=FLAG,
                dnsNames=HOSTS,
                usages=_list({"enum": ["server auth", "client auth", "digital signature", "key encipherment"]}),
                duration=DURATION,
                renewBefore=DURATION,
                privateKey=_object(
                    "algorithm size",
                    "rotationPolicy",
                    algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
                    size=NUMBER,
                    rotationPolicy={"enum": ["Always", "Never"]},
                ),
            ),
        ),
        _kind(
            "cert-manager.io/v1",
            "Issuer",
            {
                "oneOf": [
                    _object("selfSigned", selfSigned={"type": "object", "maxProperties": 0}),
                    _object("ca", ca=_object("secretName")),
                ]
            },
        ),
    )
}


def custom_problem(doc: Mapping[str, Any]) -> str:
    """Return the first problem of an object, or an empty string. Raises KeyError for an unknown kind."""
    error = next(iter(Draft202012Validator(SCHEMAS[doc["apiVersion"], doc["kind"]]).iter_errors(doc)), None)
    return "" if error is None else f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def pod_templates(doc: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the pod templates inside a custom object."""
    if doc["kind"] != "RayCluster":
        return []
    return [group["template"] for group in (doc["spec"]["headGroupSpec"], *doc["spec"]["workerGroupSpecs"])]
