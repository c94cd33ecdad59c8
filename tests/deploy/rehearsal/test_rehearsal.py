"""Runs the pods of the chart on this machine in namespaces, enforces its policies, and replaces pods under
load."""

import errno
import http.client
import logging
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import trustme

from baton.rpc.grpc_tls import SERVICE_NAME
from tests.deploy.objects import named
from tests.deploy.rehearsal.client import QUESTIONS, Client, Load
from tests.deploy.rehearsal.cluster import Cluster, Outsider, issued
from tests.deploy.rehearsal.kubelet import Kubelet
from tests.deploy.rehearsal.machine import MACHINES_TOOLS
from tests.deploy.rehearsal.pods import secret
from tests.deploy.rehearsal.values import RAY_REDIS, VALUES
from tests.deploy.renderer import NAMESPACE, RELEASE, Renderer
from tests.deploy.test_policies import ANY_CLIENT, NEEDED
from tests.netns import Netns, machine_prefix, unavailable_reason

log = logging.getLogger(__name__)
UNAVAILABLE_REASON = unavailable_reason(*MACHINES_TOOLS)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(UNAVAILABLE_REASON), reason=UNAVAILABLE_REASON or "network namespaces are available"),
]

NAME = f"{RELEASE}-baton"
GATEWAY = f"{NAME}-gateway"
START_S = 400.0
ROLL_S = 400.0
NUM_CLIENTS = 3
MORE_ANSWERS, SETTLE_S, AFTER_S = 10, 15.0, 120.0
"""After all new pods are ready, the load continues for this many answers and seconds. The third value is the
limit for these answers, in seconds."""
CONNECT_S = 1.5
PORTS = (6379, 6380, 6381, 6386, 8000, 8001, 8100, 8101, 9000, 10002, 20000)
PROGRAMS = {"baton", "raylet", "gcs_server", "valkey-server"}
"""Kernel names of the processes of the pods."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The HTTP/2 client preface with empty settings."""


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def other_processes() -> set[psutil.Process]:
    """Children of this process before the cluster started, such as servers of other test modules."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def cluster(helm: Renderer, ca: trustme.CA, other_processes: set[psutil.Process]) -> Iterator[Cluster]:
    docs = helm.docs(VALUES)
    directory = Path(tempfile.mkdtemp(prefix="reh-", dir="/tmp"))
    there = _links()
    try:
        with ExitStack() as stack:
            cluster = Cluster([*docs, *issued(docs, ca)], NAMESPACE, directory, stack)
            cluster.start()
            yield cluster
            processes = set(psutil.Process().children(recursive=True)) - other_processes
        gone, alive = psutil.wait_procs(processes, timeout=10)
        assert len(gone) > 30
        assert not alive
        assert _links() == there
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def outsider(cluster: Cluster) -> Outsider:
    return cluster.outsider()


@pytest.fixture(scope="module")
def client(cluster: Cluster, ca: trustme.CA) -> Client:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    key = secret(cluster.docs, f"{NAME}-api-keys")["api-key"].decode()
    return Client(host=GATEWAY, address=cluster.address(GATEWAY), port=8000, api_key=key, context=context)


@pytest.fixture(scope="module")
def answers(cluster: Cluster, client: Client, outsider: Outsider) -> list[str]:
    """Answers of the demo model after all pods are ready."""
    cluster.until_ready(START_S)
    return [
        outsider.netns.call(lambda question=question: client.ask(question, streams=False)) for question in QUESTIONS
    ]  # type: ignore[misc]


@pytest.fixture(scope="module")
def restarts(cluster: Cluster, answers: list[str]) -> dict[str, list[str]]:
    """Restarts until all pods were ready for the first time. Ray nodes restart until their head is up."""
    return {kubelet.pod.name: list(kubelet.restarts) for kubelet in cluster.kubelets}


def _links() -> set[str]:
    """Network namespaces and devices that this process has created."""
    listed = subprocess.run("ip netns; ip -o link", shell=True, capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf"\b{re.escape(machine_prefix())}\S*", listed))


def test_every_pod_becomes_ready_and_a_request_is_answered(
    cluster: Cluster, client: Client, outsider: Outsider, answers: list[str]
) -> None:
    counts = {component: len(cluster.pods(component)) for component in (*NEEDED, RAY_REDIS)}
    assert counts == {"gateway": 2, "scheduler": 2, "worker": 4, "ray-head": 1, "fleet": 1, "redis": 1, RAY_REDIS: 1}
    assert all(kubelet.is_ready for kubelet in cluster.kubelets)
    assert all(answers)
    assert len(set(answers)) == len(answers)
    assert [outsider.netns.call(lambda: client.ask(QUESTIONS[0], streams=True))] == answers[:1]


def test_processes_have_no_capabilities_and_a_read_only_root_file_system(
    cluster: Cluster, answers: list[str], other_processes: set[psutil.Process]
) -> None:
    seen = []
    for process in set(psutil.Process().children(recursive=True)) - other_processes:
        with suppress(psutil.Error, FileNotFoundError):
            if process.name() in PROGRAMS:
                here = Path("/proc", str(process.pid))
                status = dict(line.split(":\t", 1) for line in (here / "status").read_text().splitlines())
                rights = [status[name] for name in ("Uid", "Gid", "CapEff", "CapBnd", "NoNewPrivs")]
                root = next(
                    fields
                    for line in (here / "mountinfo").read_text().splitlines()
                    if (fields := line.split())[4] == "/"
                )
                seen.append((process.name(), rights, root[5].split(",")[0]))
    user = "\t".join(["10001"] * 4)

    assert {name for name, _, _ in seen} == PROGRAMS
    assert len(seen) >= len(cluster.pods())
    assert [each for each in seen if each[1:] != ([user, user, "0" * 16, "0" * 16, "1"], "ro")] == []


def test_policies_accept_named_connections_and_drop_others(
    cluster: Cluster, outsider: Outsider, answers: list[str]
) -> None:
    seen: dict[tuple[str, str, int], bool] = {}
    expected: dict[tuple[str, str, int], bool] = {}
    targets = {component: cluster.pods(component)[0] for component in NEEDED}
    sources = {component: cluster.pods(component)[-1].netns for component in NEEDED} | {"outsider": outsider.netns}
    for name, netns in sources.items():
        asked = {
            (component, port): (kubelet.pod.address, port)
            for component, kubelet in targets.items()
            if kubelet.pod.address != netns.address
            for port in PORTS
        }
        for (component, port), got_through in zip(asked, reach(netns, list(asked.values())), strict=True):
            seen[name, component, port] = got_through
            ranges = [*NEEDED[component].get(name, ()), *NEEDED[component].get(ANY_CLIENT, ())]
            expected[name, component, port] = any(low <= port <= high for low, high in ranges)

    assert {key for key in seen if seen[key]} == {key for key in expected if expected[key]}
    assert ("worker", "worker", 20000) in seen
    assert {("gateway", "worker", 20000), ("outsider", "scheduler", 8100), ("outsider", "redis", 6379)} <= seen.keys()


def reach(netns: Netns, places: Sequence[tuple[str, int]]) -> list[bool]:
    """Return for each address whether packets arrive: the connection is accepted or refused, but not
    dropped."""

    def tried() -> list[bool]:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in places]
            for each, place in zip(sockets, places, strict=True):
                each.setblocking(False)
                each.connect_ex(place)
            time.sleep(CONNECT_S)
            return [
                each.connect_ex(place) not in (errno.EALREADY, errno.EINPROGRESS)
                for each, place in zip(sockets, places, strict=True)
            ]

    return netns.call(tried)


def test_gateway_does_not_answer_without_tls(cluster: Cluster, outsider: Outsider, answers: list[str]) -> None:
    def ask() -> None:
        connection = http.client.HTTPConnection(cluster.address(GATEWAY), 8000, timeout=5)
        connection.request("GET", "/v1/models")
        connection.getresponse()

    with pytest.raises((http.client.HTTPException, ConnectionError)):
        outsider.netns.call(ask)


@pytest.mark.parametrize(("component", "port"), [("scheduler", 8100), ("worker", 8101)])
def test_services_refuse_connections_without_a_valid_certificate(
    cluster: Cluster, ca: trustme.CA, answers: list[str], component: str, port: int
) -> None:
    address = cluster.pods(component)[0].pod.address
    netns = cluster.pods("gateway")[0].netns
    known, foreign, anonymous = (_context(ca) for _ in range(3))
    ca.issue_cert(SERVICE_NAME).configure_cert(known)
    trustme.CA().issue_cert(SERVICE_NAME).configure_cert(foreign)

    assert netns.call(lambda: greeted(address, port, known))
    assert not netns.call(lambda: greeted(address, port, foreign))
    assert not netns.call(lambda: greeted(address, port, anonymous))
    assert not netns.call(lambda: greeted(address, port, None))


def _context(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    context.set_alpn_protocols(["h2"])
    return context


def greeted(address: str, port: int, context: ssl.SSLContext | None) -> bool:
    """Return True if an HTTP/2 server answers with its settings."""
    try:
        with socket.create_connection((address, port), timeout=5) as plain:
            connection = plain if context is None else context.wrap_socket(plain, server_hostname=SERVICE_NAME)
            with connection:
                connection.sendall(PREFACE)
                return connection.recv(9)[3:4] == b"\x04"
    except (ssl.SSLError, ConnectionError, TimeoutError):
        return False


@pytest.mark.parametrize(
    "part", ["gateway", "scheduler", "fleet", "ray-head", "worker-prefill", "worker-decode", "redis"]
)
def test_rolling_restart_fails_no_request(
    cluster: Cluster, client: Client, outsider: Outsider, answers: list[str], restarts: dict[str, list[str]], part: str
) -> None:
    cluster.until_ready(START_S)
    there = cluster.pods()
    with Load(client, outsider.netns, answers, num_threads=NUM_CLIENTS) as load:
        cluster.roll(f"{NAME}-{part}", ROLL_S)
        cluster.until_ready(ROLL_S)
        num_when_ready, ready_s = load.answered, time.monotonic()
        time.sleep(SETTLE_S)
        while load.answered < num_when_ready + MORE_ANSWERS and time.monotonic() < ready_s + AFTER_S:
            time.sleep(0.1)
    log.info("%s: %d answers, the slowest after %.1f s", part, load.answered, load.longest_s)

    assert load.failed == []
    assert load.answered >= num_when_ready + MORE_ANSWERS
    replaced = [kubelet for kubelet in there if kubelet.is_ending.is_set()]
    assert len(replaced) == named(cluster.docs, "Deployment", f"{NAME}-{part}")["spec"]["replicas"]
    assert [wrong for kubelet in replaced for wrong in _ended_badly(kubelet)] == []
    assert {kubelet.pod.name: kubelet.restarts for kubelet in cluster.kubelets} == {
        kubelet.pod.name: restarts.get(kubelet.pod.name, []) for kubelet in cluster.kubelets
    }


def _ended_badly(kubelet: Kubelet) -> list[str]:
    """Return the containers of a terminated pod that were killed, or whose hook failed or did not run."""
    codes = {ending.container: ending.pre_stop_code for ending in kubelet.endings}
    hooks = {
        container.name: 0 if container.pre_stop else None
        for container in (*kubelet.pod.sidecars, *kubelet.pod.containers)
    }
    killed = [
        f"{ending.pod}: {ending.container} was killed after {ending.took_s:.0f} s"
        for ending in kubelet.endings
        if ending.was_killed
    ]
    return killed if codes == hooks else [*killed, f"{kubelet.pod.name}: hooks ended with {codes}"]


def test_no_secret_is_in_a_log(cluster: Cluster, answers: list[str]) -> None:
    words = {
        f"{doc['metadata']['name']} {name}": value.decode()
        for doc in cluster.docs
        if doc["kind"] == "Secret"
        for name, value in secret(cluster.docs, doc["metadata"]["name"]).items()
        if name in ("api-key", "admin-key", "auth_token", "password", "tls.key")
    }
    assert len(words.keys()) == 7
    logs = {(kubelet.pod.name, name): text for kubelet in cluster.kubelets for name, text in kubelet.logs().items()}
    assert all(logs.values())
    assert [(log, name) for log, text in logs.items() for name, word in words.items() if word in text] == []
