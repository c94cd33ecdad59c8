"""Help of `baton up`: the common settings with examples, and all settings by what a user wants to do."""

import click

from baton.cli.setting_options import SettingOption, SettingsCommand

EXAMPLES = (
    ("baton up", "try it: the demo model, one prefill and one decode worker"),
    ("baton up --model Qwen/Qwen3-0.6B --decode 2", "serve a model of the Hugging Face hub, or a directory"),
    (
        "baton up --host 0.0.0.0 --api-keys keys.yaml",
        "serve other machines; `baton key new keys.yaml --name me --admin` makes a key",
    ),
)
COMMON = (
    "model",
    "served_model_name",
    "prefill",
    "decode",
    "hybrid",
    "device",
    "kv_memory",
    "max_model_len",
    "host",
    "http_port",
    "grpc_port",
    "api_keys",
    "slo",
    "policy",
    "admission",
    "log_dir",
)
"""The settings that `baton up --help` shows."""
GROUPS = {
    "Choose a model and a device": (
        "model",
        "served_model_name",
        "device",
        "dtype",
        "weights",
        "kv_dtype",
        "kernels",
        "max_model_len",
        "emulated_costs",
        "tool_parser",
        "reasoning_parser",
    ),
    "Choose workers, cores and memory": (
        "prefill",
        "decode",
        "hybrid",
        "kv_memory",
        "host_kv_memory",
        "disk_kv",
        "disk_kv_size",
        "disk_kv_io",
        "weight_cache",
        "block_size_tokens",
        "kv_announce_every",
        "kv_eviction",
        "kv_retain_memory",
        "threads_per_worker",
        "memory_budget",
        "ray_memory_limit",
    ),
    "Let clients in": (
        "host",
        "http_port",
        "grpc_port",
        "admin_port",
        "view_hosts",
        "cors_allow_origins",
        "api_keys",
        "front_tls_cert",
        "front_tls_key",
    ),
    "Limit what clients may ask": (
        "max_connections",
        "max_open_requests",
        "max_body_bytes",
        "max_response_bytes",
        "strict_fields",
        "stream_buffer_bytes",
        "request_timeout_s",
        "receive_deadline_s",
        "allow_request_chat_template",
    ),
    "Meet an SLO": (
        "slo",
        "policy",
        "admission",
        "ttft_target_factor",
        "tpot_target_factor",
        "speculate",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_worker_queue_s",
        "max_queued_requests",
        "max_queued_jobs",
    ),
    "Watch it and find out why": (
        "log_dir",
        "log_level",
        "otlp_endpoint",
        "trace_sample",
        "max_record_bytes",
        "vllm_metric_names",
        "first_prompt",
        "once",
    ),
    "Use several machines": (
        "ray_address",
        "ray_placement",
        "advertise_host",
        "cluster",
        "redis_url",
        "tls_cert",
        "tls_key",
        "tls_ca",
    ),
    "Move KV between workers": (
        "transfer",
        "gpu_kv",
        "kv_port_range",
        "min_link_gbps",
        "lease_s",
        "kv_claim_timeout_s",
        "pull_wait_s",
        "transfer_reorder_window_s",
        "transfer_deadline_min_s",
        "transfer_deadline_max_s",
    ),
    "Detect faults and recover": (
        "heartbeat_s",
        "detection_s",
        "step_limit_s",
        "max_attempts",
        "scheduler_wait_s",
        "session_grace_s",
        "session_buffer_bytes",
        "worker_start_s",
        "drain_s",
    ),
}
"""Headings of `baton up --help-all` and their settings. Each setting is in one group."""


class UpCommand(SettingsCommand):
    """Command whose `--help` shows the common settings, and whose `--help-all` shows all of them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {param.name: param for param in self.get_params(ctx)}
        with formatter.section("Examples"):
            formatter.write_dl([(command, meaning) for command, meaning in EXAMPLES])
        if ctx.meta.get(ALL):
            groups = dict(GROUPS)
        else:
            num_others = sum(isinstance(p, SettingOption) and not p.hidden for p in params.values()) - len(COMMON)
            groups = {f"Common settings ({num_others} more with --help-all)": COMMON}
        for heading, names in groups.items():
            records = [record for name in names if (record := params[name].get_help_record(ctx)) is not None]
            with formatter.section(heading):
                formatter.write_dl(records)
        others = [param.get_help_record(ctx) for param in params.values() if not isinstance(param, SettingOption)]
        with formatter.section("Options"):
            formatter.write_dl([record for record in others if record is not None])


ALL = "baton.cli.up_help.all"
"""Key of `Context.meta`: show all settings."""


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all settings, grouped by what they are for, and exit.",
)
