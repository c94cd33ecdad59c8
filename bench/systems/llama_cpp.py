"""llama.cpp's server as an engine, and its quantiser. docs/benchmarks/peers.md says how they are built.

A server has a slot for each sequence, and a fixed part of the KV memory for each slot. It is therefore
started for one kind of batch, again for the next, and ended while other systems are measured.
"""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.support.engine.engine_prompts import FIRST_ID
from bench.systems.engines import LLAMA, THREADS, EngineFailed, ServedEngine
from loadgen.send.dialects import DIALECTS
from loadgen.send.server.server_process import free_port, http_probe, running_server

SERVER, QUANTISE = "llama-server", "llama-quantize"
START_S = 300.0
QUANTISE_S = 1800.0
MAX_OUTPUT_TOKENS = 320
"""Tokens of a slot after its prompt. No cell decodes more."""
SLOT_STEP = 64
WARM_TOKENS = 128
"""Tokens of the prompts that each slot gets before the first measurement."""
LEAST_MESSAGES = 0.5
"""Smallest share of tokens that arrive in messages of their own. Below it, times of tokens mean nothing."""
DIALECT = DIALECTS["llamacpp"]


@dataclass(frozen=True, slots=True)
class LlamaTools:
    """The folder with llama.cpp's binaries."""

    folder: Path

    def require(self) -> None:
        """Raise EngineFailed with the remedy if a binary is missing."""
        for name in (SERVER, QUANTISE):
            if not (self.folder / name).exists():
                raise EngineFailed(
                    f"{self.folder} has no {name}; build llama.cpp as docs/benchmarks/peers.md says, and give "
                    "--llama the folder of its binaries"
                )

    def version(self) -> str:
        """Return the version that the server names, such as `version: 11434 (1a2b3c4)`."""
        done = subprocess.run([self.folder / SERVER, "--version"], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).splitlines()
        return next((line for line in lines if line.startswith("version")), "version unknown")

    def quantise(self, source: Path, kind: str, file: Path, log: Path, options: Sequence[str] = ()) -> None:
        """Write the weights of `source` in the type `kind` to `file`. `options`: of the quantiser."""
        unfinished = file.with_suffix(".new")
        command = [str(self.folder / QUANTISE), *options, str(source), str(unfinished), kind, str(THREADS)]
        with log.open("wb") as output:
            try:
                subprocess.run(command, stdout=output, stderr=output, check=True, timeout=QUANTISE_S)
            except (OSError, subprocess.SubprocessError) as error:
                raise EngineFailed(f"{QUANTISE} cannot write {kind} ({error}); see {log}") from error
        unfinished.replace(file)


@dataclass(frozen=True, slots=True)
class ServerShape:
    """slots: sequences at a time. slot_tokens: KV memory of each, in tokens."""

    slots: int
    slot_tokens: int


def server_shape(prompts: Sequence[Sequence[int]]) -> ServerShape:
    """Return the shape that a server needs for these prompts, with room for the tokens of any cell."""
    longest = max(map(len, prompts)) + MAX_OUTPUT_TOKENS
    return ServerShape(len(prompts), -(-longest // SLOT_STEP) * SLOT_STEP)


def server_command(server: Path, file: Path, shape: ServerShape, port: int) -> list[str]:
    """Return the command. All but threads, slots and memory are llama.cpp's defaults.

    The cache of prompts in host memory is off: no prompt returns to a slot that has lost it, so it would only
    cost time.
    """
    settings: Mapping[str, object] = {
        "--model": file,
        "--host": "127.0.0.1",
        "--port": port,
        "--threads": THREADS,
        "--parallel": shape.slots,
        "--ctx-size": shape.slots * shape.slot_tokens,
        "--cache-ram": 0,
    }
    return [str(server), *(str(part) for setting in settings.items() for part in setting)]


class LlamaEngine:
    """Runs batches on a server of a fitting shape. `rest` ends the server."""

    def __init__(self, tools: LlamaTools, file: Path, log: Path) -> None:
        """`file`: GGUF file. `log`: the server's output."""
        tools.require()
        self._server = tools.folder / SERVER
        self._file = file
        self._log = log
        self._running = ExitStack()
        self._shape: ServerShape | None = None
        self._url = ""

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        if num_outputs > MAX_OUTPUT_TOKENS:
            raise EngineFailed(f"{LLAMA}: {num_outputs} tokens of output; must be at most {MAX_OUTPUT_TOKENS}")
        self._start(server_shape(prompts))
        times = ServedEngine(self._url, DIALECT)(prompts, num_outputs)
        require_streamed(times, num_outputs)
        return times

    def rest(self) -> None:
        """End the server, so that it takes neither memory nor processor time."""
        self._shape = None
        self._running.close()

    def _start(self, shape: ServerShape) -> None:
        if shape == self._shape:
            return
        self.rest()
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = server_command(self._server, self._file, shape, port)
        probe = http_probe(self._url, {}, is_insecure=False)
        self._running.enter_context(running_server(command, probe, self._log, ready_s=START_S))
        self._shape = shape
        warm = [list(range(FIRST_ID, FIRST_ID + WARM_TOKENS))] * shape.slots
        ServedEngine(self._url, DIALECT)(warm, 2)  # the other systems have run for a while, too


def require_streamed(times: Sequence[Sequence[float]], num_outputs: int) -> None:
    """Raise EngineFailed if a sequence came in far fewer messages than it has tokens."""
    fewest = min(map(len, times))
    if fewest < LEAST_MESSAGES * num_outputs:
        raise EngineFailed(f"{LLAMA} sent {num_outputs} tokens in {fewest} messages, so they have no times")
