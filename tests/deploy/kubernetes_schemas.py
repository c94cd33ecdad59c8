"""Kubernetes' own strict schemas, from the package `kubernetes-validate`.

Unknown fields and kinds are errors.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

VERSIONS = ("1.29.0", "1.33.0", "1.37.0")
DEFINITIONS = "_definitions.json"


def kubernetes_problem(doc: Mapping[str, Any], version: str) -> str:
    """Return the first problem of an object in a Kubernetes version, or an empty string.

    Raises FileNotFoundError if this version does not have the kind.
    """
    group, _, name = doc["apiVersion"].rpartition("/")
    file = f"{doc['kind'].lower()}-{group.split('.')[0]}-{name}.json" if group else f"{doc['kind'].lower()}-{name}.json"
    return _first(_validator(version, file), doc)


def pod_template_problem(template: Mapping[str, Any], version: str) -> str:
    """Return the first problem of a pod template inside a custom object, or an empty string."""
    return _first(_definition(version, "io.k8s.api.core.v1.PodTemplateSpec"), template)


def _first(validator: Draft202012Validator, value: Any) -> str:
    error = next(iter(validator.iter_errors(value)), None)
    return "" if error is None else f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


@cache
def _registry(version: str) -> Registry:
    definitions = Resource.from_contents(_contents(version, DEFINITIONS))
    return definitions @ Registry()


@cache
def _validator(version: str, file: str) -> Draft202012Validator:
    schema = _contents(version, file)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _registry(version))


@cache
def _definition(version: str, name: str) -> Draft202012Validator:
    identity = _contents(version, DEFINITIONS)["$id"]
    return Draft202012Validator({"$ref": f"{identity}#/$defs/{name}"}, registry=_registry(version))


def _contents(version: str, file: str) -> Any:
    return schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{file}", version)
