"""A small simulated cluster with the tests' times, for tests of single scenarios."""

from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import ClusterConfig
from baton.sim.sim_cluster import SimModel
from baton.sim.sim_transfer_backend import LinkModel
from tests.times import TEST_TIMES

MODEL = SimModel(num_blocks=160, link=LinkModel(stuck=0.005, stuck_s=8.0))

POLICY_BY_SEED = ("kv_centric", "least_loaded", "random")
"""`kv_centric` reads prefixes from any worker and may prefill on the decode worker. The others always
transfer."""


def config(policy: str = "least_loaded") -> ClusterConfig:
    names = {setting.name for setting in settings_of(ClusterConfig)}
    return ClusterConfig(
        prefill=2,
        decode=2,
        log_dir=None,
        block_size_tokens=8,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        policy=policy,  # type: ignore[arg-type]  # one of POLICY_BY_SEED
        **{name: value for name, value in TEST_TIMES.items() if name in names},  # type: ignore[arg-type]
    )
