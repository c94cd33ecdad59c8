"""Isolates the containers of one pod with Linux namespaces: root file system, host name, network and
processes.

The root file system contains this machine's /usr and this Python at their own paths, instead of those of an
image. The cache of each pod has the compiled CPU kernels from the start. Otherwise every new worker would
compile them, which takes minutes if all of them do it on one machine.
"""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

import baton
from baton.model.kernels.cpu import kernel_build
from baton.runtime.process.process import with_parent_death_signal
from baton.store.redis.private_redis import find_server
from tests.deploy.rehearsal.pods import Container, Files, Pod, Scratch
from tests.netns import Netns, tool

START_S = 10.0
MACHINES_TOOLS = ("setpriv", "pivot_root")
_OF_THIS_MACHINE = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_CACHE = "/var/cache/baton"
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")


class Machine:
    """The namespaces of one pod. They end with the thread that created them."""

    def __init__(self, pod: Pod, netns: Netns, directory: Path) -> None:
        """`directory`: contains the pod's `hosts` file, and later its other files and logs."""
        self.pod = pod
        self.directory = directory
        self._source = Path(baton.__file__).parents[1]
        (directory / "root").mkdir()
        script = directory / "root.sh"
        script.write_text("\n".join(["set -e", *self._root()]), encoding="utf-8")
        enter = [
            tool("nsenter"),
            f"--net={netns.path}",
            "--",
            "unshare",
            "--uts",
            "--ipc",
            "--pid",
            "--mount",
            "--fork",
            "--kill-child",
        ]
        self._pause = subprocess.Popen(
            with_parent_death_signal([*enter, "sh", str(script)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._pause.stdout is not None
        said = self._pause.stdout.readline()
        assert said == "up\n", f"{pod.name}: {said}{self._pause.stdout.read()}"
        (first,) = psutil.Process(self._pause.pid).children()
        self._first_pid = first.pid

    def start(self, container: Container) -> "Running":
        """Start the process of a container in a new process namespace, unless the pod shares one."""
        alone = () if self.pod.shares_processes else ("unshare", "--pid", "--fork", "--mount", "--mount-proc")
        argv = [*self._enter(self._first_pid), *alone, *self._as_user(container.argv)]
        with self.log_of(container).open("ab") as log:
            process = subprocess.Popen(
                with_parent_death_signal(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ(container),
            )
        return Running(process, depth=1 if self.pod.shares_processes else 2)

    def run_in(self, running: "Running", container: Container, argv: Sequence[str], limit_s: float) -> int:
        """Run a command in a running container. Return its exit code, or 124 after the timeout."""
        with self.log_of(container).open("ab") as log:
            done = subprocess.Popen(
                with_parent_death_signal([*self._enter(running.pid()), *self._as_user(argv)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ(container),
            )
            try:
                return done.wait(limit_s)
            except subprocess.TimeoutExpired:
                for process in psutil.Process(done.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        process.kill()
                done.wait()
                return 124

    def log_of(self, container: Container) -> Path:
        return self.directory / f"{container.name}.log"

    def close(self) -> None:
        """Kill all processes of the pod. The logs stay."""
        self._pause.kill()
        self._pause.wait()
        assert self._pause.stdout is not None
        self._pause.stdout.close()

    def _environ(self, container: Container) -> dict[str, str]:
        """Return the environment of a container, with this machine's Baton and Redis first in its paths."""
        path = f"/opt/rehearsal:{container.environ['PATH']}"
        return {**container.environ, "PATH": path, "PYTHONPATH": str(self._source), "HOSTNAME": self.pod.name}

    def _enter(self, pid: int) -> list[str]:
        return [tool("nsenter"), "--target", str(pid), *_NAMESPACES, "--"]

    def _as_user(self, argv: Sequence[str]) -> list[str]:
        who = (f"--reuid={self.pod.user}", f"--regid={self.pod.group}", "--clear-groups")
        return [
            "setpriv",
            *who,
            "--no-new-privs",
            "--bounding-set=-all",
            "--inh-caps=-all",
            "env",
            "--chdir=/tmp",
            *argv,
        ]

    def _root(self) -> list[str]:
        """Return the shell script that creates the root file system and changes into it."""
        root = self.directory / "root"
        lines = [
            f"mount -t tmpfs -o mode=0755 root {_quoted(root)}",
            f"cd {_quoted(root)}",
            "mkdir proc dev sys etc opt run .etc",
        ]
        for path in (Path("/", name) for name in _OF_THIS_MACHINE):
            if path.is_symlink():
                lines.append(f"ln -s {path.readlink()} {path.name}")
            elif path.is_dir():
                lines += _bound(path, path)
        lines += ["mount --rbind /dev dev", "mount -t sysfs sysfs sys"]
        lines += [
            "mkdir .etc/upper .etc/work",
            "mount -t overlay -o lowerdir=/etc,upperdir=.etc/upper,workdir=.etc/work overlay etc",
        ]
        for volume in self.pod.volumes:
            lines += self._mounted(volume)
        for path in sorted(
            {Path(sys.prefix), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), self._source}
        ):
            lines += [] if path.is_relative_to("/usr") else _bound(path, path)
        lines += _bound(self.directory / "hosts", Path("/etc/hosts"))
        lines += [f"ln -s {_quoted(sys.prefix)} opt/baton", "mkdir opt/rehearsal"]
        lines += [f"ln -s {_quoted(find_server())} opt/rehearsal/valkey-server"]
        lines += [
            "mkdir .old",
            "pivot_root . .old",
            "cd /",
            "mount -t proc proc /proc",
            "umount -l /.old",
            "mount -o remount,ro /",
        ]
        return [*lines, "ip link set lo up", f"hostname {_quoted(self.pod.name)}", "echo up", "exec sleep infinity"]

    def _mounted(self, volume: Files | Scratch) -> list[str]:
        place = _quoted(f".{volume.path}")
        if isinstance(volume, Scratch):
            lines = [f"mkdir -p {place}", f"mount -t tmpfs -o mode=1777,size={volume.max_bytes} tmpfs {place}"]
            if volume.path == _CACHE:
                own, owner = f"{place}/baton", f"{self.pod.user}:{self.pod.group}"
                lines += [f"mkdir -p {own}/kernels", f"cp {_quoted(kernel_build.build())} {own}/kernels"]
                lines += [f"chown --recursive {owner} {own}"]
            return lines
        directory = self.directory / "volumes" / volume.path.strip("/").replace("/", "-")
        directory.mkdir(parents=True)
        for name, content in volume.contents.items():
            file = directory / name
            file.write_bytes(content)
            file.chmod(volume.mode)
            shutil.chown(file, group=self.pod.group)
        return [*_bound(directory, Path(volume.path)), f"mount -o remount,bind,ro {place}"]


class Running:
    """The process of a container."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, depth: int) -> None:
        self._process = process
        self._depth = depth
        self._pid: int | None = None

    def pid(self) -> int:
        """Process id of the container's process in this namespace.

        Raises ProcessLookupError after its end.
        """
        end_s = time.monotonic() + START_S
        while self._pid is None:
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise ProcessLookupError(self._process.args)
            with suppress(psutil.Error):
                chain = [psutil.Process(self._process.pid)]
                for _ in range(self._depth):
                    chain = chain[0].children()[:1] if chain else []
                if chain and chain[0].name() not in ("unshare", "setpriv", "env", "nsenter"):
                    self._pid = chain[0].pid
                    break
            time.sleep(0.01)
        return self._pid

    def signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        with suppress(ProcessLookupError, psutil.Error):
            psutil.Process(self.pid()).send_signal(number)

    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, limit_s: float) -> bool:
        """Wait for the end. Return True if the process ended within the timeout."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self._process.poll() is not None


def _bound(source: Path, place: Path) -> list[str]:
    """Return the mount commands for a file or directory of this machine."""
    inside = _quoted(f".{place}")
    make = f"mkdir -p {inside}" if source.is_dir() else f"mkdir -p {_quoted(f'.{place.parent}')} && touch {inside}"
    return [make, f"mount --rbind {_quoted(source)} {inside}"]


def _quoted(path: Path | str) -> str:
    return shlex.quote(str(path))
