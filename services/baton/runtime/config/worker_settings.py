"""The settings of what a worker computes with, and of how KV moves between workers."""

from typing import Literal

from baton.core.errors import ConfigError
from baton.runtime.config.config_base import Config, config, setting
from baton.runtime.config.step_cost_text import parse_step_costs

MIB = 2**20


@config
class ComputeSettings(Config):
    """Read by the worker: its model, device and memory."""

    device: Literal["auto", "cpu", "cuda", "emulated"] = setting(
        "auto",
        help="where the model runs; auto is cuda where there is a GPU; emulated computes nothing: its steps take --emulated-costs",
    )
    emulated_costs: str = setting(
        "step=8ms, prefill_token=60us, prefill_attended=2ns, decode_seq=50us, decode_context=60ns",  # help is wrapped at spaces
        help="what a step of --device emulated takes: step, and for each token of a prompt, pair of them that attends, sequence that decodes, "
        "token of its context; the default is about an 8B model's on a GPU of 2 TB/s and 250 TFLOP/s",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", help="type of weights and KV; auto is what the checkpoint says"
    )
    kernels: Literal["auto", "torch"] = setting(
        "auto",
        help="what computes on a CPU: auto is our kernels, compiled at the first start, where there is a C++ compiler; or torch alone",
    )
    kv_memory: int | None = setting(
        None,
        help="memory for KV blocks of one worker; without it, half of what the model and its largest step leave, of a GPU nine tenths",
        unit="bytes",
        minimum=1,
    )
    block_size_tokens: int = setting(
        16, help="tokens of a KV block, one size a cluster", unit="tokens", minimum=1, maximum=1024
    )
    max_model_len: int | None = setting(
        None, help="most tokens of prompt and answer together; without it, the model's own", unit="tokens", minimum=1
    )
    max_num_seqs: int = setting(64, help="sequences that a worker runs at a time", minimum=1)
    max_num_batched_tokens: int = setting(
        512, help="token budget of a step, which is also the largest chunk of a prompt", unit="tokens", minimum=1
    )
    threads_per_worker: int | None = setting(
        None,
        help="compute threads of a worker; without it, its share of the cores, or of what a container's limit leaves",
        minimum=1,
    )
    step_limit_s: float = setting(
        60.0, help="longest step; a worker whose step takes longer is stuck, and exits", unit="seconds", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parse_step_costs(self.emulated_costs)
        except ValueError as error:
            raise ConfigError(f"emulated_costs: {error}") from error
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "each running sequence needs a token of every step"
            )


@config
class TransferSettings(Config):
    """Read by the worker: how KV moves, and how long each side waits for the other."""

    transfer: Literal["nixl", "local"] = setting(
        "nixl", help="how KV moves: nixl, or local (shared memory between processes of one machine)"
    )
    kv_port_range: str | None = setting(
        None, help="TCP ports for KV, LOW-HIGH, where a firewall needs to know; without it, any"
    )
    lease_s: float = setting(30.0, help="life of a lease after its last renewal", unit="seconds", above=0)
    claim_s: float = setting(
        30.0, help="time that computed KV is kept for a reader that has not come yet", unit="seconds", above=0
    )
    early_s: float = setting(
        5.0,
        help="time that a reader waits for a job it overtook, and that an ended transfer is remembered",
        unit="seconds",
        above=0,
    )
    handoff_wait_s: float = setting(
        30.0, help="time that a pull waits for memory before it is refused", unit="seconds", above=0
    )
    transfer_deadline_min_s: float = setting(
        5.0, help="least deadline of a read, however small it is", unit="seconds", above=0
    )
    transfer_deadline_max_s: float = setting(
        40.0, help="most deadline of a read, however large it is", unit="seconds", above=0
    )
    session_grace_s: float = setting(
        20.0, help="time that jobs of a gateway live on after its stream broke", unit="seconds", above=0
    )
    session_buffer_bytes: int = setting(
        16 * MIB,
        help="unacknowledged messages kept for one gateway; a session that needs more is ended",
        unit="bytes",
        minimum=64 * 1024,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transfer_deadline_min_s > self.transfer_deadline_max_s:
            raise ConfigError(
                f"transfer_deadline_min_s ({self.transfer_deadline_min_s:g}) is more than "
                f"transfer_deadline_max_s ({self.transfer_deadline_max_s:g})"
            )
        if self.kv_port_range is not None:
            port_range(self.kv_port_range)


def port_range(text: str) -> tuple[int, int]:
    """(low, high) of `LOW-HIGH`, both included. Raises ConfigError."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < 65536):
        raise ConfigError(f"kv_port_range: expected LOW-HIGH with 1 <= LOW <= HIGH <= 65535, got {text!r}")
    return int(low), int(high)
