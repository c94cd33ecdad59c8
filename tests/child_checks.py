"""Functions that tests run in child processes. They end as a backend can end a process."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import ModelError
from baton.runtime.child.stages import Report, StageRunner


def _wrong_numbers() -> None:
    raise ModelError("logits differ by 0.7 of their standard deviation")


def _segfault() -> None:
    ctypes.string_at(0)


def _illegal_access() -> None:
    """Raise what torch raises when a kernel has broken the device."""
    raise type("AcceleratorError", (RuntimeError,), {})("an illegal memory access was encountered")


def _illegal_access_on_the_gpu() -> None:
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([1 << 30], device="cuda")]
    torch.cuda.synchronize()


def _out_of_memory() -> None:
    raise type("OutOfMemoryError", (RuntimeError,), {})("no memory")


def _hang() -> None:
    time.sleep(600)


def _flood() -> None:
    for _ in range(200):
        os.write(2, b"x" * 65535 + b"\n")
    os.write(2, b"the last line\n")
    os.abort()


ENDS: Mapping[str, Callable[[], None]] = {
    "pass": lambda: None,
    "wrong": _wrong_numbers,
    "segfault": _segfault,
    "abort": os.abort,
    "illegal": _illegal_access,
    "illegal on the gpu": _illegal_access_on_the_gpu,
    "memory": _out_of_memory,
    "hang": _hang,
    "flood": _flood,
    "killed": lambda: os.kill(os.getpid(), 9),
}


def _say(text: str) -> None:
    """Write to standard output, as libraries do."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def judge(payload: Mapping[str, Any], report: Report) -> None:
    """Run `payload["stages"]`, a mapping of names to `ENDS`, one after the other."""
    stages = StageRunner(payload["known"], report)
    for name, end in payload["stages"].items():
        stages.run(name, ENDS[end])


def compile_caches(_payload: Mapping[str, Any], report: Report) -> None:
    """Report where inductor keeps what it compiles, and where Triton's kernels then are."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    report({"inductor": cache_dir(), "triton": triton_cache_dir(0)})


def compile_layers(payload: Mapping[str, Any], report: Report) -> None:
    """Verify compiled layers as a worker does, and report what inductor found in its cache.

    payload: `path` of the model, and `scratch`, where a reduced one is written if that is run instead.
    """
    from torch._dynamo.utils import counters

    from baton.model.attention.paged_attention import paged_attention
    from baton.model.backends.backend_selection import build_compiled_backend
    from baton.model.gpu_check.check_backends import CheckedModel, load_reduced
    from baton.model.loading.model_loader import load_model

    path, scratch = Path(payload["path"]), payload.get("scratch")
    if scratch is None:
        loaded = load_model(path, dtype="float32", device="cpu")
    else:
        model = CheckedModel(
            path=str(path),
            dtype="float32",
            kv_dtype="auto",
            max_model_len=None,
            block_size_tokens=16,
            max_num_seqs=3,
            max_num_batched_tokens=40,
            device="cpu",
        )
        loaded = load_reduced(model, Path(scratch))
    build_compiled_backend(loaded, paged_attention, "torch", 16)
    found = counters["inductor"]
    report(
        {
            "layers": loaded.model.config.num_hidden_layers,
            "hits": found["fxgraph_cache_hit"],
            "misses": found["fxgraph_cache_miss"],
        }
    )


def set_up(payload: Mapping[str, Any], report: Report) -> None:
    """End before any stage."""
    _say("this goes to standard error")
    ENDS[payload["end"]]()


def answer(payload: Mapping[str, Any], report: Report) -> None:
    """Report the payload, with text on both streams."""
    _say("not an answer")
    report({"got": dict(payload)})
    report({"pid": os.getpid()})


def hang_with_children(payload: Mapping[str, Any], report: Report) -> None:
    """Start another process, report its id, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report({"child": child.pid})
    time.sleep(600)


def leave_a_thread(payload: Mapping[str, Any], report: Report) -> None:
    """Return while a thread hangs, for which an interpreter waits."""
    threading.Thread(target=_hang).start()
    report({"returned": True})
    _say("the last line")


def exit_with(payload: Mapping[str, Any], report: Report) -> None:
    """Raise SystemExit, or another error for the code None."""
    if payload["code"] is None:
        raise ModelError("no such model")
    sys.exit(payload["code"])
