"""Checks settings and the files that they name before `baton up` starts anything.

The services check the same again. They start some seconds later, and their errors arrive through several
processes.
"""

from functools import partial
from pathlib import Path

from baton.core.errors import ConfigError, ModelError
from baton.engine.executors.emulated_model import read_emulated_model
from baton.engine.kv_cache.sizing import num_kv_blocks
from baton.fleet.local.local_plan import plan_local_workers
from baton.gateway.auth.key_file import read_keys
from baton.gateway.output.format_choice import choose_format
from baton.rpc.grpc_tls import SERVICE_NAME
from baton.runtime.config.scheduler_settings import POLICY_OF_A_MODULE
from baton.runtime.config.settings import ClusterConfig
from baton.runtime.network.client_trust import client_trust
from baton.runtime.network.tls_files import read_authorities


def check_policy(config: ClusterConfig) -> None:
    """Load the policy of another module. Raises ConfigError if that fails.

    Called before the event loop runs: Ctrl-C then also ends a module whose import does not return.
    """
    if POLICY_OF_A_MODULE.matches(config.policy):
        from baton.scheduler.policy_loading.load_policy import load_policy

        load_policy(config.policy)


async def check_before_start(config: ClusterConfig) -> None:
    """Check key file, certificates, parsers and memory. Raises ConfigError or ModelError."""
    choose_format("", tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser)
    if config.api_keys is not None:
        read_keys(config.api_keys)
    if config.front_tls_pair is not None:
        config.front_tls_pair.check()
    _check_service_certificate(config)
    if config.ray_address is None:
        await plan_local_workers(config)


def check_model(config: ClusterConfig, directory: Path) -> None:
    """Check that --max-model-len and --kv-memory fit the model. Raises ConfigError or ModelError.

    The model's config.json is read without transformers. What its defaults would add is left to the workers,
    as is the memory of a model with sliding windows.
    """
    read = partial(read_emulated_model, dtype=config.dtype, kv_dtype=config.kv_dtype)
    try:
        model = read(directory)
    except ModelError:
        return
    if config.max_model_len is not None:
        model = read(directory, max_model_len=config.max_model_len)
    if config.kv_memory is not None and not model.has_window:
        num_kv_blocks(
            model.layout(config.block_size_tokens),
            max_model_len=model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            chunk_tokens=config.step_tokens(on_gpu=False),  # without windows, no number of blocks depends on it
            free=config.kv_memory,
            kv_memory=config.kv_memory,
        )


def _check_service_certificate(config: ClusterConfig) -> None:
    pair, ca = config.tls_pair, config.tls_ca
    if pair is None or ca is None:
        return
    pair.check()
    read_authorities(ca)
    trust = client_trust(pair, [ca], SERVICE_NAME)
    if trust.ca is None:
        raise ConfigError(f"tls_cert: {pair.certificate} is not valid now, or not signed by the authority in {ca}")
    if trust.name:
        raise ConfigError(f"tls_cert: {pair.certificate} names {trust.name}; it must contain the name {SERVICE_NAME}")
