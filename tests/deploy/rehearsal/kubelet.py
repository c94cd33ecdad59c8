"""Runs one pod as a kubelet does: start, probes, restarts, and termination in Kubernetes' order."""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.rehearsal.machine import Machine, Running
from tests.deploy.rehearsal.pods import Container, Pod
from tests.deploy.rehearsal.probes import FAILURES, PERIOD_S, why_failing
from tests.netns import Netns

TICK_S = 0.2
BACK_OFF_S = (0.0, 10.0, 20.0, 40.0)
"""Delay before the first start of a container, the second, and so on."""
SIDECAR_END_S = 2.0
"""Kubernetes' minimum termination time of sidecars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The termination of a container.

    pre_stop_code: exit code of its hook; None without a hook.
    was_killed: the grace period was exceeded.
    """

    pod: str
    container: str
    pre_stop_code: int | None
    exit_code: int | None
    was_killed: bool
    took_s: float


@dataclass(kw_only=True)
class _Probing:
    """State of one probe of a container."""

    probe: Mapping[str, Any]
    due_s: float = 0.0
    failed: int = 0
    why: str = ""


@dataclass(kw_only=True)
class _ContainerState:
    """A container and its current process."""

    container: Container
    running: Running | None = None
    num_starts: int = 0
    start_at_s: float = 0.0
    has_started: bool = False
    is_ready: bool = False
    probing: dict[str, _Probing] = field(default_factory=dict)


class Kubelet(threading.Thread):
    """Runs one pod in its own thread until it is terminated. Its namespaces end with it."""

    def __init__(self, pod: Pod, netns: Netns, directory: Path, on_change: Callable[[], None]) -> None:
        """`on_change`: called when readiness changes, and when termination begins and ends."""
        super().__init__(name=f"kubelet-{pod.name}", daemon=True)
        self.pod = pod
        self.netns = netns
        self.is_ready = False
        self.is_ending = threading.Event()
        self.restarts: list[str] = []
        self.endings: list[Ending] = []
        self.failed: BaseException | None = None
        self._kill = threading.Event()
        self._directory = directory
        self._on_change = on_change
        self._containers = [_ContainerState(container=container) for container in pod.containers]
        self._sidecars = [_ContainerState(container=container) for container in pod.sidecars]

    @property
    def hosts(self) -> Path:
        """The pod's /etc/hosts. It may be overwritten at any time."""
        return self._directory / "hosts"

    def end(self) -> None:
        """Terminate the pod as `kubectl delete pod` does, with its grace period. `join` waits for the end."""
        self.is_ending.set()
        self._on_change()

    def kill(self) -> None:
        """Kill the pod without a grace period."""
        self._kill.set()
        self.is_ending.set()

    def why_not_ready(self) -> str:
        """Return the messages of failing probes."""
        states = [*self._sidecars, *self._containers]
        said = [
            f"{state.container.name}: {kind}: {each.why}"
            for state in states
            for kind, each in state.probing.items()
            if each.why
        ]
        return f"{self.pod.name}: {'; '.join(said) or 'has not been asked'}; restarts: {self.restarts}"

    def log(self) -> str:
        """Return the ends of the containers' logs."""
        return "\n".join(
            f"--- {file.parent.name}/{file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in self._logs()
        )

    def logs(self) -> dict[str, str]:
        """Return the logs by container."""
        return {file.stem: file.read_text(errors="replace") for file in self._logs()}

    def _logs(self) -> list[Path]:
        return sorted(self._directory.glob("*.log"))

    def run(self) -> None:
        try:
            machine = Machine(self.pod, self.netns, self._directory)
            self._on_change()
            try:
                self._keep(machine)
                if not self._kill.is_set():
                    self._end(machine)
            finally:
                machine.close()
                self.netns.delete()
        except BaseException as error:
            self.failed = error
            raise
        finally:
            self.is_ready = False
            self.is_ending.set()
            self._on_change()

    def _keep(self, machine: Machine) -> None:
        while not self.is_ending.wait(TICK_S):
            for state in self._sidecars:
                self._look_after(machine, state)
            if all(state.has_started for state in self._sidecars):
                for state in self._containers:
                    self._look_after(machine, state)
            is_ready = all(state.is_ready for state in (*self._sidecars, *self._containers))
            if is_ready != self.is_ready:
                self.is_ready = is_ready
                self._on_change()

    def _look_after(self, machine: Machine, state: _ContainerState) -> None:
        now_s = time.monotonic()
        if state.running is not None and (code := state.running.exit_code()) is not None:
            self._start_again_later(state, f"exit code {code}")
        if state.running is None:
            if now_s < state.start_at_s:
                return
            state.running = machine.start(state.container)
            state.num_starts += 1
            container = state.container
            kinds = {"startup": container.startup, "readiness": container.readiness, "liveness": container.liveness}
            state.probing = {
                kind: _Probing(probe=probe, due_s=now_s) for kind, probe in kinds.items() if probe is not None
            }
            state.has_started = "startup" not in state.probing
            state.is_ready = state.has_started and "readiness" not in state.probing
        if not state.has_started:
            self._start_up(machine, state)
            return
        if "readiness" in state.probing and (why := self._ask(machine, state, "readiness")) is not None:
            state.is_ready = not why or (state.is_ready and not _is_over(state, "readiness"))
        if "liveness" in state.probing and self._ask(machine, state, "liveness") and _is_over(state, "liveness"):
            self._stop_one(machine, state, f"liveness: {state.probing['liveness'].why}")

    def _start_up(self, machine: Machine, state: _ContainerState) -> None:
        why = self._ask(machine, state, "startup")
        if why == "":
            state.has_started = True
            state.is_ready = "readiness" not in state.probing
        elif why and _is_over(state, "startup"):
            self._stop_one(machine, state, f"startup: {why}")

    def _ask(self, machine: Machine, state: _ContainerState, kind: str) -> str | None:
        """Run a probe if it is due.

        Return the failure, an empty string on success, or None if it is not due.
        """
        each = state.probing[kind]
        if time.monotonic() < each.due_s:
            return None
        assert state.running is not None
        running = state.running

        def run(argv: Sequence[str], limit_s: float) -> int:
            return machine.run_in(running, state.container, argv, limit_s)

        each.why = why_failing(each.probe, self.pod.address, run)
        each.failed = each.failed + 1 if each.why else 0
        each.due_s = time.monotonic() + float(each.probe.get("periodSeconds", PERIOD_S))
        return each.why

    def _stop_one(self, machine: Machine, state: _ContainerState, why: str) -> None:
        self._end_all(machine, [state], time.monotonic() + self.pod.grace_s)
        self._start_again_later(state, why)

    def _start_again_later(self, state: _ContainerState, why: str) -> None:
        self.restarts.append(f"{state.container.name}: {why}")
        state.running, state.has_started, state.is_ready = None, False, False
        state.start_at_s = time.monotonic() + BACK_OFF_S[min(state.num_starts - 1, len(BACK_OFF_S) - 1)]

    def _end(self, machine: Machine) -> None:
        end_s = time.monotonic() + self.pod.grace_s
        self._end_all(machine, self._containers, end_s)
        self._end_all(machine, self._sidecars[::-1], max(end_s, time.monotonic() + SIDECAR_END_S))

    def _end_all(self, machine: Machine, states: Sequence[_ContainerState], end_s: float) -> None:
        """Terminate containers one after the other. Pods of the chart have one container and its sidecars."""
        for state in states:
            if state.running is None:
                continue
            began_s = time.monotonic()
            code = None
            if state.container.pre_stop is not None and state.running.exit_code() is None:
                code = machine.run_in(state.running, state.container, state.container.pre_stop, end_s - began_s)
            state.running.signal(signal.SIGTERM)
            has_ended = state.running.wait(max(SIDECAR_END_S, end_s - time.monotonic()))
            if not has_ended:
                state.running.signal(signal.SIGKILL)
                state.running.wait(SIDECAR_END_S)
            self.endings.append(
                Ending(
                    pod=self.pod.name,
                    container=state.container.name,
                    pre_stop_code=code,
                    exit_code=state.running.exit_code(),
                    was_killed=not has_ended,
                    took_s=time.monotonic() - began_s,
                )
            )


def _is_over(state: _ContainerState, kind: str) -> bool:
    """Return True if the probe has reached its failure threshold."""
    each = state.probing[kind]
    return each.failed >= int(each.probe.get("failureThreshold", FAILURES))
