"""The target of a run as plain values, which can be passed to another process, and the client for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from loadgen.measure.request_metrics import OutcomeRules
from loadgen.plan.plan import Plan
from loadgen.send.client import Client
from loadgen.send.dialects import DIALECTS, Dialect

FILE_TABLE_SIZE = 32_768
"""Size to which the kernel's table of file descriptors is grown before a run."""
RESERVED_FILES = 64
"""File descriptors reserved for other uses than connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server of a run and the form in which requests are sent to it.

    - `protocol`: http or grpc
    - `api`: completions or chat
    - `prompts`: ids or text
    - `tokenizer`: directory of the tokenizer whose words make up texts
    - `dialect`: key into `DIALECTS`
    - `more`: the user's additional body fields
    """

    urls: tuple[str, ...]
    model: str
    protocol: str = "http"
    api: str = "completions"
    prompts: str = "ids"
    tokenizer: str | None = None
    dialect: str = "openai"
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    is_insecure: bool = False

    @property
    def takes(self) -> Dialect:
        """The dialect of the server."""
        return DIALECTS[self.dialect]

    def rules(self, plan: Plan) -> OutcomeRules:
        """Return the rules for evaluating responses of `plan`.

        A server that cannot be told the length or to ignore EOS may end before the planned length without
        penalty.
        """
        can_ignore_eos = self.protocol == "grpc" or self.takes.ignore_eos
        ignores_eos = can_ignore_eos and self.more.get("ignore_eos", True) is True and "max_tokens" not in self.more
        return OutcomeRules(slos=plan.slos, ignore_eos=plan.ignore_eos and ignores_eos)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "urls": tuple(data["urls"])})


def new_client(target: Target, max_connections: int = 1 << 30) -> Client:
    """Return a client for this process with at most `max_connections` connections. Raises LoadgenError."""
    if target.protocol == "grpc":
        from loadgen.send.grpc.grpc_client import GrpcClient, GrpcSettings

        return GrpcClient(
            GrpcSettings(
                targets=target.urls,
                model=target.model,
                metadata=target.headers,
                more=target.more,
                timeout_s=target.timeout_s,
                is_insecure=target.is_insecure,
            )
        )
    from loadgen.send.http.http_client import HttpClient, HttpSettings

    return HttpClient(
        HttpSettings(
            urls=target.urls,
            model=target.model,
            dialect=target.takes,
            is_chat=target.api == "chat",
            headers=target.headers,
            more=target.more,
            timeout_s=target.timeout_s,
            is_insecure=target.is_insecure,
            max_connections=max_connections,
        )
    )


def raise_file_limit() -> int:
    """Raise this process's limit of file descriptors and return how many connections it allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (
        hard if hard != resource.RLIM_INFINITY else 1 << 20,
        65_536,
        10_240,
    ):  # macOS has a limit below the one that it states
        if limit > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                soft = limit
    _grow_file_table(min(soft, FILE_TABLE_SIZE))
    return max(1, soft - RESERVED_FILES)


def _grow_file_table(num_files: int) -> None:
    """Grow the kernel's table of file descriptors before the run.

    Linux doubles the table when it is full. In a process with threads that takes an RCU grace period of 10 to
    20 ms, too long during a run. The table never shrinks.
    """
    try:
        first = os.open(os.devnull, os.O_RDONLY)
        try:
            os.close(os.dup2(first, num_files - 1))
        finally:
            os.close(first)
    except OSError:  # the table then grows on demand
        pass
