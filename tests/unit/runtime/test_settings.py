from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.core.request import Slo
from baton.runtime.config.config_base import Config, derive, settings_of
from baton.runtime.config.settings import (
    ALL_NAMES,
    SERVICES,
    ClusterConfig,
    FleetConfig,
    GatewayConfig,
    SchedulerConfig,
    WorkerConfig,
    load_settings,
)
from baton.runtime.config.worker_settings import port_range
from tests.times import TEST_TIMES


@pytest.mark.parametrize("cls", SERVICES.values())
def test_each_service_has_usable_defaults_and_documents_each_setting(cls: type[Config]) -> None:
    cls()
    for item in settings_of(cls):
        assert item.help, item.name
        assert not item.help.endswith("."), item.name
        assert item.name.endswith("_s") == (item.unit == "seconds"), item.name


def test_setting_has_the_same_type_and_limits_in_every_service() -> None:
    kinds: dict[str, tuple[object, ...]] = {}
    for cls in SERVICES.values():
        for item in settings_of(cls):
            kind = (item.kind, item.optional, item.choices, item.unit, item.minimum, item.above, item.maximum)
            assert kinds.setdefault(item.name, kind) == kind, item.name


def test_up_has_every_service_setting_except_those_it_sets_itself() -> None:
    set_by_up = {"admin_tls", "rpc_port", "schedulers", "role", "worker_id", "drain_socket", "scale_with_nodes"}
    set_by_up |= {"workers_on_host", "workers_on_gpu"}
    assert ALL_NAMES - {item.name for item in settings_of(ClusterConfig)} == set_by_up


def test_service_settings_are_derived_from_cluster_settings() -> None:
    cluster = ClusterConfig(model="/m", lease_s=7.0, decode=2, http_port=0)
    assert derive(WorkerConfig, cluster, role="decode", worker_id="w1").lease_s == 7.0
    assert derive(GatewayConfig, cluster).model_name == "/m"
    assert derive(FleetConfig, cluster).decode == 2
    assert derive(SchedulerConfig, cluster).heartbeat_s == cluster.heartbeat_s


def test_test_times_are_settings_below_the_defaults() -> None:
    cluster = ClusterConfig(**TEST_TIMES)  # type: ignore[arg-type]
    assert all(getattr(cluster, name) < getattr(ClusterConfig(), name) for name in TEST_TIMES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prefill": 1, "decode": 0}, "no worker could decode"),
        ({"prefill": 0, "decode": 2}, "no worker could prefill"),
        ({"http_port": 9, "grpc_port": 9}, "http_port and grpc_port are both 9"),
        ({"heartbeat_s": 3.0}, "at least two heartbeat_s"),
        ({"transfer_deadline_min_s": 50.0}, "is more than transfer_deadline_max_s"),
        ({"max_num_seqs": 600, "max_num_batched_tokens": 512}, "must be at least max_num_seqs"),
        ({"kv_port_range": "9-3"}, "expected LOW-HIGH"),
        ({"emulated_costs": "step=4"}, "emulated_costs: step: expected a duration such as 4ms"),
        ({"slo": "ttft=500"}, "ttft: expected a duration such as"),
        ({"slo": "latency=1s"}, "expected TERM=DURATION with a term of ttft, tpot"),
        ({"slo": "tpot=0ms"}, "durations must be above 0"),
        ({"once": True}, "once needs first_prompt"),
        ({"cluster": "a/b"}, "cluster: expected up to 63 letters"),
        ({"ray_address": "ray://h:10001"}, "ray://h:10001 is a Ray Client address.*--num-cpus 0"),
    ],
)
def test_invalid_combination_of_settings_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**values)  # type: ignore[arg-type]


def test_cluster_of_hybrid_workers_and_two_free_ports_are_valid() -> None:
    assert ClusterConfig(prefill=0, decode=0, hybrid=2).hybrid == 2
    assert ClusterConfig(http_port=0, grpc_port=0).grpc_port == 0


def test_one_config_file_is_valid_for_all_services(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("policy: round_robin\nlease_s: 3\nmax_body_bytes: 1MiB\n")
    assert load_settings(SchedulerConfig, flags={}, environ={}, file=file).config.policy == "round_robin"
    assert (
        load_settings(GatewayConfig, flags={}, environ={"BATON_LEASE_S": "4"}, file=file).config.max_body_bytes == 2**20
    )
    file.write_text("polcy: round_robin\n")
    with pytest.raises(ConfigError, match="did you mean 'policy'"):
        load_settings(GatewayConfig, flags={}, environ={}, file=file)


def test_default_slo_is_parsed() -> None:
    assert GatewayConfig(slo="tpot=50ms, ttft=1.5s").default_slo == Slo(ttft_s=1.5, tpot_s=0.05)
    assert GatewayConfig().default_slo == Slo()


def test_port_range_is_parsed() -> None:
    assert port_range("20000-20100") == (20000, 20100)
