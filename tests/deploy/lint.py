"""Checks of rendered objects that no schema expresses: references, ports, drains and the restricted
profile."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.deploy.objects import Workload, bytes_of, of_kind, selects, workloads
from tests.deploy.renderer import Doc

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
MAX_NAME = 63
Problems = Iterator[str]


def problems(docs: Sequence[Doc], *, namespace: str, external: Iterable[str] = ()) -> list[str]:
    """Return the problems of these objects, one sentence each.

    external: names of Secrets and claims that exist outside the chart.
    """
    found = [*_of_objects(docs, namespace), *_of_services(docs), *_of_budgets(docs), *_of_scaling(docs)]
    there = _provided(docs) | {("secret", name) for name in external} | {("claim", name) for name in external}
    for workload in workloads(docs):
        for check in CHECKS:
            found += [f"{workload.name}: {problem}" for problem in check(workload)]
        found += [f"{workload.name}: {problem}" for problem in _of_references(workload, there)]
        found += [f"{workload.name}: {problem}" for problem in _of_accounts(workload, docs)]
    return found


def _of_objects(docs: Sequence[Doc], namespace: str) -> Problems:
    for doc, count in Counter((doc["apiVersion"], doc["kind"], doc["metadata"]["name"]) for doc in docs).items():
        if count > 1:
            yield f"{doc[1]} {doc[2]} is defined {count} times"
    for doc in docs:
        name = f"{doc['kind']} {doc['metadata']['name']}"
        if len(doc["metadata"]["name"]) > MAX_NAME:
            yield f"{name}: the name is longer than {MAX_NAME}"
        if doc["metadata"].get("namespace") != namespace:
            yield f"{name}: is not in the release's namespace"
        for label, value in (doc["metadata"].get("labels") or {}).items():
            if len(value) > MAX_NAME:
                yield f"{name}: the label {label} is longer than {MAX_NAME}"


def _of_services(docs: Sequence[Doc]) -> Problems:
    there = list(workloads(docs))
    for service in of_kind(docs, "Service"):
        name = f"Service {service['metadata']['name']}"
        behind = [workload for workload in there if selects(service["spec"]["selector"], workload.labels)]
        if not behind:
            yield f"{name}: selects no pod"
        for port in service["spec"]["ports"]:
            for workload in behind:
                if port["targetPort"] not in _ports(workload):
                    yield f"{name}: {workload.name} has no port {port['targetPort']!r}"


def _of_budgets(docs: Sequence[Doc]) -> Problems:
    scaled = {
        doc["spec"]["scaleTargetRef"]["name"]: doc["spec"]["minReplicaCount"] for doc in of_kind(docs, "ScaledObject")
    }
    for budget in of_kind(docs, "PodDisruptionBudget"):
        name = f"PodDisruptionBudget {budget['metadata']['name']}"
        behind = [
            workload
            for workload in workloads(docs)
            if selects(budget["spec"]["selector"]["matchLabels"], workload.labels)
        ]
        if len(behind) != 1:
            yield f"{name}: selects {len(behind)} workloads"
        for workload in behind:
            least = workload.replicas if workload.replicas is not None else scaled[workload.name]
            if least < 2:
                yield f"{name}: prevents the eviction of the only pod of {workload.name}"
        if str(budget["spec"]["maxUnavailable"]) in ("0", "0%"):
            yield f"{name}: allows no eviction"


def _of_scaling(docs: Sequence[Doc]) -> Problems:
    targets = [doc["spec"]["scaleTargetRef"]["name"] for doc in of_kind(docs, "ScaledObject")]
    for target, count in Counter(targets).items():
        if count > 1:
            yield f"Deployment {target}: is scaled by {count}"
    deployments = {workload.name: workload for workload in workloads(docs) if workload.kind == "Deployment"}
    for target in targets:
        if target not in deployments:
            yield f"ScaledObject: there is no Deployment {target}"
        elif deployments[target].replicas is not None:
            yield f"Deployment {target}: has replicas although a ScaledObject scales it"
    for name, workload in deployments.items():
        if workload.replicas is None and name not in targets:
            yield f"Deployment {name}: neither replicas nor a scaler sets its number of pods"


def _of_selectors(workload: Workload) -> Problems:
    if workload.selector is not None and not selects(workload.selector, workload.labels):
        yield "its selector is not its pods' labels"
    for constraint in workload.spec.get("topologySpreadConstraints", ()):
        if not selects(constraint["labelSelector"]["matchLabels"], workload.labels):
            yield "its spread constraint selects other pods than its own"


def _of_ports(workload: Workload) -> Problems:
    numbers = Counter(
        port["containerPort"] for container in workload.containers for port in container.get("ports", ())
    )  # containers of a pod share one address
    yield from (f"port {number} is taken {count} times" for number, count in numbers.items() if count > 1)
    for container in workload.containers:
        own = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        for probe in PROBES:
            for how in ("httpGet", "tcpSocket", "grpc"):
                port = container.get(probe, {}).get(how, {}).get("port")
                if port is not None and port not in own and port not in own.values():
                    yield f"{container['name']}: {probe} uses port {port!r}, which the container does not have"


def _of_images(workload: Workload) -> Problems:
    for container in workload.containers:
        _, _, tag = container["image"].rpartition("/")[2].partition(":")
        if "@" not in container["image"] and tag in ("", "latest"):
            yield f"{container['name']}: {container['image']} has no fixed tag; it may change"


def _of_resources(workload: Workload) -> Problems:
    shm = sum(
        bytes_of(volume["emptyDir"]["sizeLimit"])
        for volume in workload.spec["volumes"]
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    )
    for container in workload.containers:
        resources = container.get("resources", {})
        for where, what in (("requests", "cpu"), ("requests", "memory"), ("limits", "memory")):
            if what not in resources.get(where, {}):
                yield f"{container['name']}: has no {where}.{what}"
                return
        if bytes_of(resources["requests"]["memory"]) > bytes_of(resources["limits"]["memory"]):
            yield f"{container['name']}: requests more memory than its limit"
        mounts = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
        if "/dev/shm" in mounts and shm > bytes_of(resources["limits"]["memory"]):
            yield f"{container['name']}: /dev/shm is larger than its memory limit"


def _of_volumes(workload: Workload) -> Problems:
    volumes = [volume["name"] for volume in workload.spec["volumes"]]
    yield from (f"two volumes {name}" for name, count in Counter(volumes).items() if count > 1)
    mounted = set()
    for container in workload.containers:
        mounts = container.get("volumeMounts", [])
        mounted |= {mount["name"] for mount in mounts}
        for path, count in Counter(mount["mountPath"] for mount in mounts).items():
            if count > 1:
                yield f"{container['name']}: {path} is mounted {count} times"
        yield from (
            f"{container['name']}: there is no volume {mount['name']}"
            for mount in mounts
            if mount["name"] not in volumes
        )
    yield from (f"no container mounts the volume {name}" for name in volumes if name not in mounted)
    for volume in workload.spec["volumes"]:
        if "emptyDir" in volume and not volume["name"].startswith("more") and "sizeLimit" not in volume["emptyDir"]:
            yield f"the volume {volume['name']} may fill the node"


def _of_environment(workload: Workload) -> Problems:
    for container in workload.containers:
        names = [variable["name"] for variable in container.get("env", ())]
        yield from (
            f"{container['name']}: {name} is set {count} times" for name, count in Counter(names).items() if count > 1
        )
        for index, variable in enumerate(container.get("env", ())):
            for used in _used(variable.get("value", "")):
                if used not in names[:index]:
                    yield f"{container['name']}: {variable['name']} uses {used}, which is not set before it"
        for argument in container.get("args", ()):
            yield from (
                f"{container['name']}: {argument} uses {used}, which is not set"
                for used in _used(argument)
                if used not in names
            )


def _of_profile(workload: Workload) -> Problems:
    """Check the Pod Security Standard "restricted". RDMA also needs IPC_LOCK."""
    spec, pod = workload.spec, workload.spec["securityContext"]
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is on"
    if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
        yield "may run as root"
    if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if spec.get("enableServiceLinks") is not False:
        yield "gets variables for each Service of the namespace"
    if any("hostPath" in volume for volume in spec["volumes"]):
        yield "mounts a directory of its node"
    for container in workload.containers:
        context, capabilities = container["securityContext"], container["securityContext"]["capabilities"]
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield f"{container['name']}: may get more privileges"
        if not context.get("readOnlyRootFilesystem"):
            yield f"{container['name']}: may write to its root file system"
        if capabilities.get("drop") != ["ALL"]:
            yield f"{container['name']}: keeps capabilities"
        if extra := set(capabilities.get("add", ())) - ({"IPC_LOCK"} if _has_rdma(container) else set()):
            yield f"{container['name']}: adds {sorted(extra)}"


CHECKS: Sequence[Callable[[Workload], Problems]] = (
    _of_selectors,
    _of_ports,
    _of_images,
    _of_resources,
    _of_volumes,
    _of_environment,
    _of_profile,
)


def _of_references(workload: Workload, there: set[tuple[str, str]]) -> Problems:
    """Check references. `there`: existing (kind, name), and (kind, name, key) of objects of the chart."""
    for kind, name, keys in references(workload):
        if (kind, name) not in there:
            yield f"there is no {kind} {name}"
        known = {entry[2] for entry in there if len(entry) == 3 and entry[:2] == (kind, name)}
        yield from (f"{kind} {name} has no key {key}" for key in keys if known and key not in known)


def references(workload: Workload) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, name, keys) of the ConfigMaps and Secrets that the pods use. No keys: all of them."""
    for volume in workload.spec["volumes"]:
        if "configMap" in volume:
            yield (
                "config map",
                volume["configMap"]["name"],
                [item["key"] for item in volume["configMap"].get("items", ())],
            )
        if "secret" in volume:
            yield "secret", volume["secret"]["secretName"], [item["key"] for item in volume["secret"].get("items", ())]
        if "persistentVolumeClaim" in volume:
            yield "claim", volume["persistentVolumeClaim"]["claimName"], []
    for pull in workload.spec.get("imagePullSecrets", ()):
        yield "secret", pull["name"], []
    for container in workload.containers:
        for variable in container.get("env", ()):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                yield "secret", reference["name"], [reference["key"]]


def _of_accounts(workload: Workload, docs: Sequence[Doc]) -> Problems:
    if workload.spec.get("automountServiceAccountToken") is not False:
        yield "has a token of the Kubernetes API"
    account = workload.spec.get("serviceAccountName")
    if account != "default" and not any(doc["metadata"]["name"] == account for doc in of_kind(docs, "ServiceAccount")):
        yield f"there is no ServiceAccount {account}"


def _provided(docs: Sequence[Doc]) -> set[Any]:
    """Return (kind, name) of the objects of the chart, and (kind, name, key) of their content."""
    found: set[Any] = set()
    for doc in of_kind(docs, "ConfigMap", "Secret"):
        kind = "config map" if doc["kind"] == "ConfigMap" else "secret"
        found.add((kind, doc["metadata"]["name"]))
        found |= {
            (kind, doc["metadata"]["name"], key) for part in ("data", "stringData") for key in doc.get(part) or ()
        }
    for certificate in of_kind(docs, "Certificate"):
        name = certificate["spec"]["secretName"]
        found |= {("secret", name), *(("secret", name, key) for key in ("tls.crt", "tls.key", "ca.crt"))}
    return found


def _ports(workload: Workload) -> set[str]:
    return {port["name"] for container in workload.containers for port in container.get("ports", ())}


def _used(text: str) -> list[str]:
    return [part.partition(")")[0] for part in text.split("$(")[1:]]


def _has_rdma(container: Mapping[str, Any]) -> bool:
    return any(name.startswith("rdma/") for name in container["resources"].get("limits", {}))
