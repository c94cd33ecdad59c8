"""Settings of a worker: the model and device that it runs, its queue, and how it transfers KV."""

from pathlib import Path
from typing import Literal

from baton.core.errors import ConfigError
from baton.core.step_cost import StepCostModel
from baton.core.step_targets import TargetFactors
from baton.runtime.config.byte_sizes import MIB
from baton.runtime.config.config_base import Config, config, setting
from baton.runtime.config.durations import parse_durations
from baton.runtime.config.setting import OtherForm

_COST_TERMS = ("step", "prefill_token", "prefill_attended", "decode_seq", "decode_context", "draft_token")

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048
"""Default token budgets of a step on a CPU and on a GPU, see `ComputeSettings.step_tokens`."""
DRAFT_PREFIX = "draft:"
"""Begins the value of `speculate` that names a draft model."""


@config
class ComputeSettings(Config):
    """Model, device and memory of a worker."""

    device: Literal["auto", "cpu", "cuda", "emulated"] = setting(
        "auto",
        help="device that runs the model; auto selects cuda if there is a GPU, else cpu; emulated runs no model: each "
        "step waits "
        "as long as --emulated-costs predicts",
        value_aliases={"paced": "emulated"},
    )
    emulated_costs: str = setting(
        # with spaces, so that help can wrap it
        "step=8ms, prefill_token=60us, prefill_attended=2ns, decode_seq=50us, decode_context=60ns",
        help="step duration of --device emulated, as a sum of costs: per step, per prefill token, per (query, "
        "context) pair that prefill "
        "attends, per decoding sequence, per token of its context and per draft token (draft_token; if it is not "
        "given, as much as a decoding sequence); the default is about an 8B model on a GPU with 2 TB/s and 250 TFLOP/s",
        aliases=("paced_costs",),
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        help="data type of weights and KV; auto uses the checkpoint's, or bfloat16 if its weights are quantised "
        "or if the model overflows in float16. Quantised weights stay so",
    )
    weights: Literal["auto", "int8", "int4"] = setting(
        "auto",
        help="format of weights in memory; auto keeps the checkpoint's; int8 and int4 quantise the linear layers "
        "of a plain checkpoint when it is loaded, on a CPU",
    )
    weight_cache: int = setting(
        32 << 30,
        help="size of all packed weights in the user's cache directory, those used last; workers of a machine share "
        "their memory, and later starts need not read the checkpoint; 0 keeps and shares nothing",
        unit="bytes",
        minimum=0,
    )
    kv_dtype: Literal["auto", "int8"] = setting(
        "auto",
        help="data type of the KV cache; auto uses that of the weights; int8 halves its memory and the bytes of "
        "transfers; must be the same for all workers of a cluster",
    )
    kernels: Literal["auto", "torch"] = setting(
        "auto",
        help="CPU kernels; auto uses Baton's own, compiled at the first start, if there is a C++ compiler; torch uses "
        "PyTorch only",
    )
    speculate: Literal["auto", "ngram", "off"] | str = setting(
        "auto",
        help="draft tokens that a decode step verifies together, which never changes an answer; auto drafts from the "
        "prompt and answer, from recent answers of the same tenant and from grammars, where measured step costs say "
        "that it pays; draft:DIR adds a small model with the same tokenizer, found as --model is, where it pays; "
        "ngram drafts only from the prompt and answer, even if no costs are known; off drafts nothing",
        other_form=OtherForm(name=f"{DRAFT_PREFIX}DIR", pattern=f"{DRAFT_PREFIX}.+"),
    )
    kv_memory: int | None = setting(
        None,
        help="KV cache size of one worker; unset uses 50 % of the host memory left after weights and peak "
        "activations, or 90 % on a GPU",
        unit="bytes",
        minimum=1,
    )
    host_kv_memory: int | None = setting(
        None,
        help="host memory of one worker for copies of KV that its device has no room for; unset uses 50 % of the host "
        "memory that is free on a machine with GPUs, at most the size of the KV cache, and none on a CPU, where the "
        "KV cache is in host memory; 0 uses none",
        unit="bytes",
        minimum=0,
    )
    disk_kv: Path | None = setting(
        None,
        help="directory in which each worker of a machine keeps copies of KV in a file of its own, which the next "
        "worker finds; use one directory for one model; unset keeps none",
    )
    disk_kv_size: int | None = setting(
        None,
        help="size of the KV file of one worker, which is allocated at start; another size empties the file",
        unit="bytes",
        minimum=1,
    )
    disk_kv_io: Literal["threads", "nixl", "gds"] = setting(
        "threads",
        help="how the KV file is read and written: threads use system calls, nixl uses NIXL's POSIX backend, gds its "
        "GPUDirect Storage backend (not verified)",
    )
    block_size_tokens: int = setting(
        16,
        help="tokens per KV block; must be the same for all workers of a cluster",
        unit="tokens",
        minimum=1,
        maximum=1024,
    )
    kv_announce_every: int = setting(
        8,
        help="of how many successive KV blocks of a prompt one is announced to the schedulers, with its last full "
        "block; 1 announces all",
        unit="blocks",
        minimum=1,
        maximum=64,
    )
    kv_eviction: Literal["value", "lru"] = setting(
        "value",
        help="which cached KV a worker evicts first; value evicts what is predicted to save the least time, by the "
        "cost of computing it and the pauses of its session; lru evicts the least recently used",
    )
    kv_retain_memory: int | None = setting(
        None,
        help="how much of a worker's KV cache, and of its host memory for KV, the requests of one tenant can retain "
        "with retain_s and next_in_s; unset uses a tenth of each; 0 ignores these fields",
        unit="bytes",
        minimum=0,
    )
    max_model_len: int | None = setting(
        None, help="maximum prompt and output length together; unset uses the model's maximum", unit="tokens", minimum=1
    )
    max_num_seqs: int = setting(64, help="maximum number of sequences in one step of a worker", minimum=1)
    max_num_batched_tokens: int | None = setting(
        None,
        help=f"token budget of one step, and so the largest prefill chunk; unset uses {CPU_STEP_TOKENS} on a CPU or "
        f"an emulated device, and {GPU_STEP_TOKENS} on a GPU, which was not measured; or --max-num-seqs if that is "
        "more",
        unit="tokens",
        minimum=1,
    )
    threads_per_worker: int | None = setting(
        None,
        help="compute threads per worker; unset gives each worker an equal share of the cores, limited by the "
        "container's CPU quota",
        minimum=1,
    )
    ttft_target_factor: float = setting(
        10.0,
        help="TTFT target of a request without a TTFT SLO, as a multiple of the TTFT of a prompt of its length on the "
        "idle worker",
        above=1,
        maximum=1000,
    )
    tpot_target_factor: float = setting(
        4.0,
        help="TPOT target of a request without a TPOT SLO, as a multiple of the TPOT of one answer on the idle "
        "worker; prompts get the step time that answers can spare within it",
        above=1,
        maximum=1000,
    )
    step_limit_s: float = setting(
        60.0,
        help="maximum duration of one step; a worker that exceeds it is taken for stuck and exits",
        unit="seconds",
        above=0,
    )

    def step_tokens(self, *, on_gpu: bool) -> int:
        """Return the token budget of a step: `max_num_batched_tokens`, or its default on this kind of device.

        A GPU takes as long for 512 tokens as for fewer, because launching kernels is the limit there.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS, self.max_num_seqs)

    @property
    def target_factors(self) -> TargetFactors:
        """The factors of the latency targets of requests without an SLO."""
        return TargetFactors(ttft=self.ttft_target_factor, tpot=self.tpot_target_factor)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parse_step_costs(self.emulated_costs)
        except ValueError as error:
            raise ConfigError(f"emulated_costs: {error}") from error
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): "
                "each running sequence needs one token of every step"
            )
        if (self.disk_kv is None) != (self.disk_kv_size is None):
            raise ConfigError("disk_kv and disk_kv_size are the directory and the size of KV on disk; set both or none")


@config
class QueueSettings(Config):
    """Queue limit of a worker, which the worker enforces and the scheduler respects."""

    max_queued_jobs: int = setting(
        256,
        help="maximum number of jobs queued in one worker before their first step; more are refused",
        minimum=1,
        aliases=("max_queue",),
    )


@config
class TransferSettings(Config):
    """Timeouts and transport of KV transfers, and limits of a gateway's session with a worker."""

    transfer: Literal["nixl", "local", "collective", "auto"] = setting(
        "nixl",
        help="KV transport: nixl; local (shared memory between processes of one machine); collective (NCCL between "
        "GPUs, Gloo between CPUs); auto measures those that both workers of a pair have and uses the fastest",
    )
    gpu_kv: Literal["auto", "direct", "staged"] = setting(
        "auto",
        help="how peers read the KV of a GPU; direct reads its memory, staged reads a copy in "
        "host memory; auto measures both between two processes of this machine and uses the faster one; set it if "
        "peers are on other machines and their network reaches GPU memory (direct) or does not (staged)",
    )
    kv_port_range: str | None = setting(
        None, help="TCP ports for KV transfers, LOW-HIGH, for firewalls that must allow them; unset uses any free port"
    )
    min_link_gbps: float = setting(
        0.0,
        help="minimum speed of KV reads from another worker; a pair of workers that measures less when it connects is "
        "not used, and is measured again after 5 s to 5 min; 0 uses any",
        unit="Gbit/s",
        minimum=0,
    )
    lease_s: float = setting(
        30.0, help="time after which a KV lease expires unless its reader renews it", unit="seconds", above=0
    )
    kv_claim_timeout_s: float = setting(
        30.0,
        help="time that finished prefill KV is kept for a decode worker that has not asked for it yet",
        unit="seconds",
        above=0,
        aliases=("claim_s",),
    )
    transfer_reorder_window_s: float = setting(
        5.0,
        help="tolerance for transfer messages that arrive out of order: how long a reader's request waits for its "
        "prefill job, and how "
        "long an ended transfer is remembered",
        unit="seconds",
        above=0,
        aliases=("early_s",),
    )
    pull_wait_s: float = setting(
        30.0,
        help="time that a KV pull waits for free blocks before its request is placed again",
        unit="seconds",
        above=0,
        aliases=("handoff_wait_s",),
    )
    transfer_deadline_min_s: float = setting(
        5.0, help="minimum timeout of one KV read, even if it is small", unit="seconds", above=0
    )
    transfer_deadline_max_s: float = setting(
        40.0, help="maximum timeout of one KV read, even if it is large", unit="seconds", above=0
    )
    session_grace_s: float = setting(
        20.0,
        help="time that a gateway's jobs keep running after its stream to the worker broke",
        unit="seconds",
        above=0,
    )
    session_buffer_bytes: int = setting(
        64 * MIB,
        help="maximum memory of messages that one gateway has not acknowledged; beyond it the worker ends the session",
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
            if self.transfer == "collective":
                raise ConfigError("kv_port_range is for NIXL only: remove it, or use --transfer nixl or auto")


def port_range(text: str) -> tuple[int, int]:
    """Parse `LOW-HIGH` into (low, high), both inclusive. Raises ConfigError if it is malformed."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < 65536):
        raise ConfigError(f"kv_port_range: expected LOW-HIGH with 1 <= LOW <= HIGH <= 65535, got {text!r}")
    return int(low), int(high)


def parse_step_costs(text: str) -> StepCostModel:
    """Parse the text form of a step cost model, such as `step=8ms,prefill_token=60us`.

    Terms may be in any order. A missing term costs nothing, except that a draft token then costs as much as a
    decoding sequence. Raises ValueError naming the wrong term.
    """
    seconds = parse_durations(text, _COST_TERMS)
    if not sum(seconds.values()):
        raise ValueError(f"every step would take no time; set at least one of {', '.join(_COST_TERMS)} above 0")
    return StepCostModel.of([seconds.get(name, 0.0) for name in _COST_TERMS])


def draft_model_of(speculate: str) -> str | None:
    """Return the draft model that `speculate` names, in the forms of `model`; None if it names none."""
    return speculate.removeprefix(DRAFT_PREFIX) if speculate.startswith(DRAFT_PREFIX) else None
