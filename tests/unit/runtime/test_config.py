import json
import math
from pathlib import Path
from typing import Literal

import jsonschema
import pytest

from baton.core.errors import ConfigError
from baton.runtime.config.config_base import (
    Config,
    config,
    derive,
    dump,
    json_schema,
    load,
    restore,
    setting,
    settings_of,
)


@config
class Timing(Config):
    lease_s: float = setting(30.0, help="life of a lease", unit="seconds", above=0)
    beat_s: float = setting(2.0, help="interval", unit="seconds", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beat_s > self.lease_s:
            raise ConfigError("beat_s is more than lease_s")


@config
class Sizes(Config):
    memory: int | None = setting(None, help="memory", unit="bytes", minimum=1)
    port: int = setting(8000, help="port", minimum=0, maximum=65535)


@config
class Service(Timing, Sizes):
    mode: Literal["fast", "safe"] = setting("safe", help="how")
    eager: bool = setting(False, help="at once")
    peers: tuple[str, ...] = setting((), help="who")
    where: Path | None = setting(Path("~/here"), help="directory")
    url: str | None = setting(None, help="store", secret=True)


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "baton.yaml"
    file.write_text(text)
    return file


def load_service(file: Path | None = None, *, environ: dict[str, str] | None = None, **flags: object) -> Service:
    return load(Service, flags=flags, environ=environ or {}, file=file).config


def test_flag_overrides_variable_overrides_file_overrides_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nlease_s: 11\nbeat_s: 1.5\n")
    loaded = load(
        Service, flags={"port": "3", "lease_s": None}, environ={"BATON_PORT": "2", "BATON_LEASE_S": "12"}, file=file
    )
    assert (loaded.config.port, loaded.config.lease_s, loaded.config.beat_s, loaded.config.mode) == (
        3,
        12.0,
        1.5,
        "safe",
    )
    assert loaded.sources["port"] == "--port"
    assert loaded.sources["lease_s"] == "BATON_LEASE_S"
    assert loaded.sources["beat_s"] == f"{file}: beat_s"
    assert loaded.sources["mode"] == "default"


def test_every_type_is_parsed_from_text_and_from_yaml(tmp_path: Path) -> None:
    expected = Service(
        memory=512 * 2**20, port=9, mode="fast", eager=True, peers=("a:1", "b:2"), where=Path("/x"), lease_s=3.0
    )
    from_text = load_service(
        memory="512MiB", port="9", mode="fast", eager="yes", peers="a:1, b:2", where="/x", lease_s="3"
    )
    yaml = "memory: 512MiB\nport: 9\nmode: fast\neager: true\npeers: ['a:1', 'b:2']\nwhere: /x\nlease_s: 3\n"
    from_yaml = load_service(write(tmp_path, yaml))
    assert from_text == from_yaml == expected


def test_integers_in_exponent_notation_are_parsed(tmp_path: Path) -> None:
    assert load_service(write(tmp_path, "memory: 8.388608e+06\nport: 1e+03\n")).memory == 8388608
    assert load_service(write(tmp_path, "port: 1e+03\n")).port == 1000


def test_null_and_empty_variable_mean_unset(tmp_path: Path) -> None:
    assert load_service(write(tmp_path, "where: null\n")).where is None
    assert load_service(environ={"BATON_PORT": ""}).port == 8000
    with pytest.raises(ConfigError, match="port: expected an integer, got None"):
        load_service(write(tmp_path, "port: null\n"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "http"}, "--port: expected an integer, got 'http'"),
        ({"port": "1.5"}, "--port: expected an integer, got '1.5'"),
        ({"port": "70000"}, "--port: must be at most 65535, got 70000"),
        ({"port": True}, "--port: expected an integer, got True"),
        ({"lease_s": "0"}, "--lease-s: must be more than 0, got 0"),
        ({"lease_s": "nan"}, "--lease-s: expected a finite number, got nan"),
        ({"mode": "sage"}, "--mode: expected one of fast, safe, got 'sage'"),
        ({"eager": "perhaps"}, "--eager: expected true or false, got 'perhaps'"),
        ({"memory": "lots"}, "--memory: 'lots' is not a size"),
        ({"memory": "0"}, "--memory: must be at least 1, got 0"),
        ({"peers": 3}, "--peers: expected a list of strings, got 3"),
        ({"lease_s": "1"}, "beat_s is more than lease_s"),
    ],
)
def test_error_of_an_invalid_value_names_its_source(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_service(**flags)
    assert message in str(error.value)


def test_kubernetes_service_link_variable_gives_the_remedy() -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        load_service(environ={"BATON_PORT": "tcp://10.0.0.7:80"})


@pytest.mark.parametrize(("key", "near"), [("lease", "lease_s"), ("Beat-S", "beat_s"), ("memry", "memory")])
def test_unknown_key_suggests_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'; did you mean '{near}'"):
        load_service(write(tmp_path, f"{key}: 1\n"))


def test_key_of_another_service_is_ignored(tmp_path: Path) -> None:
    file = write(tmp_path, "policy: x\n")
    assert load(Service, flags={}, environ={"BATON_POLICY": "x"}, file=file, also_known={"policy"}).warnings == ()
    with pytest.raises(ConfigError, match=r"unknown key 'policy'$"):
        load_service(file)


def test_unknown_environment_variable_gives_a_warning() -> None:
    environ = {
        "BATON_PROT": "1",
        "BATON_TEST_LONG": "1",
        "BATON_GATEWAY_SERVICE_HOST": "10.0.0.7",
        "BATON_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.7",
        "PATH": "/bin",
    }
    assert load(Service, flags={}, environ=environ).warnings == (
        "unknown environment variable BATON_PROT; did you mean BATON_PORT?",
    )


@pytest.mark.parametrize("text", ["- 1\n", "port: [\n", "1: 2\n", "port: 1\nport: 2\n", "just words\n"])
def test_file_that_is_not_a_flat_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"baton\.yaml"):
        load_service(write(tmp_path, text))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_service(tmp_path / "none.yaml")


def test_direct_construction_validates_values() -> None:
    with pytest.raises(ConfigError, match="lease_s: expected a finite number"):
        Service(lease_s=math.inf)
    with pytest.raises(ConfigError, match="mode: expected one of"):
        Service(mode="sage")  # type: ignore[arg-type]


def test_secrets_are_masked() -> None:
    loaded = load(Service, flags={"url": "redis://me:hunter2@host:6379/0"}, environ={})
    rows = {name: shown for name, shown, _ in loaded.rows()}
    assert rows["url"] == "redis://me:***@host:6379/0"
    assert "hunter2" not in repr(loaded.config)


def test_rows_show_values_in_input_format() -> None:
    rows = {
        name: shown for name, shown, _ in load(Service, flags={"memory": 2**30, "peers": ["a", "b"]}, environ={}).rows()
    }
    assert (rows["memory"], rows["peers"], rows["eager"], rows["url"]) == ("1GiB", "a,b", "false", "")


def test_dump_is_restored_after_json() -> None:
    service = Service(peers=("a",), where=None, memory=5, url="redis://h")
    assert restore(Service, json.loads(json.dumps(dump(service)))) == service
    with pytest.raises(ConfigError, match="unknown settings"):
        restore(Service, {"prt": 1})


def test_derive_copies_common_settings() -> None:
    timing = derive(Timing, Service(lease_s=9.0, port=1), beat_s=0.5)
    assert timing == Timing(lease_s=9.0, beat_s=0.5)


def test_flag_and_variable_are_derived_from_the_field_name() -> None:
    lease = next(item for item in settings_of(Service) if item.name == "lease_s")
    assert (lease.flag, lease.variable, lease.description) == (
        "--lease-s",
        "BATON_LEASE_S",
        "life of a lease (seconds)",
    )


def test_schema_accepts_valid_values_and_rejects_invalid_ones(tmp_path: Path) -> None:
    schema = json_schema(Timing, Service)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    good = {
        "memory": "512MiB",
        "port": 1,
        "mode": "fast",
        "eager": True,
        "peers": ["a"],
        "where": None,
        "lease_s": 2.5,
        "url": None,
    }
    assert validator.is_valid(good)
    assert validator.is_valid(dump(Service()))
    for bad in [
        {"prt": 1},
        {"port": -1},
        {"port": None},
        {"mode": "sage"},
        {"memory": "lots"},
        {"lease_s": 0},
        {"peers": "a"},
    ]:
        assert not validator.is_valid(bad), bad


def test_setting_of_an_unsupported_type_is_refused() -> None:
    @config
    class Unsupported(Config):
        table: tuple[int, ...] = setting((), help="")

    with pytest.raises(TypeError, match="a setting cannot be of type"):
        settings_of(Unsupported)


@config
class Renamed(Config):
    kv_timeout_s: float = setting(30.0, help="timeout", unit="seconds", above=0, aliases=("claim_s",))
    device: Literal["cpu", "emulated"] = setting("cpu", help="device", value_aliases={"paced": "emulated"})


def deprecated(old: str, new: str) -> str:
    return f"{old} is deprecated and will be removed in the next release; use {new}"


def test_deprecated_flag_is_accepted_with_a_warning() -> None:
    loaded = load(Renamed, flags={"claim_s": "3", "kv_timeout_s": None}, environ={})
    assert loaded.config.kv_timeout_s == 3.0
    assert loaded.sources["kv_timeout_s"] == "--claim-s"
    assert loaded.warnings == (deprecated("--claim-s", "--kv-timeout-s"),)


def test_deprecated_variable_is_accepted_with_a_warning() -> None:
    loaded = load(Renamed, flags={}, environ={"BATON_CLAIM_S": "3"})
    assert (loaded.config.kv_timeout_s, loaded.sources["kv_timeout_s"]) == (3.0, "BATON_CLAIM_S")
    assert loaded.warnings == (deprecated("BATON_CLAIM_S", "BATON_KV_TIMEOUT_S"),)


def test_deprecated_yaml_key_is_accepted_with_a_warning(tmp_path: Path) -> None:
    file = write(tmp_path, "claim_s: 3\n")
    loaded = load(Renamed, flags={}, environ={}, file=file)
    assert (loaded.config.kv_timeout_s, loaded.sources["kv_timeout_s"]) == (3.0, f"{file}: claim_s")
    assert loaded.warnings == (deprecated(f"{file}: claim_s", f"{file}: kv_timeout_s"),)


@pytest.mark.parametrize("order", [("claim_s", "kv_timeout_s"), ("kv_timeout_s", "claim_s")])
def test_deprecated_and_new_name_in_one_source_are_refused(tmp_path: Path, order: tuple[str, str]) -> None:
    both = dict.fromkeys(order, "3")
    with pytest.raises(ConfigError, match=r"^--kv-timeout-s and --claim-s are the same setting, and both are given"):
        load(Renamed, flags=both, environ={})
    with pytest.raises(ConfigError, match="BATON_KV_TIMEOUT_S and BATON_CLAIM_S are the same setting"):
        load(Renamed, flags={}, environ={"BATON_CLAIM_S": "1", "BATON_KV_TIMEOUT_S": "1"})
    with pytest.raises(ConfigError, match=r"baton\.yaml: kv_timeout_s and .*baton\.yaml: claim_s are the same setting"):
        load(Renamed, flags={}, environ={}, file=write(tmp_path, "".join(f"{name}: 3\n" for name in order)))


def test_flag_overrides_a_deprecated_key_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "claim_s: 3\n")
    assert load(Renamed, flags={"kv_timeout_s": "4"}, environ={}, file=file).config.kv_timeout_s == 4.0


def test_deprecated_choice_is_accepted_with_a_warning(tmp_path: Path) -> None:
    loaded = load(Renamed, flags={"device": "paced"}, environ={})
    assert loaded.config.device == "emulated"
    assert loaded.warnings == (deprecated("--device: paced", "emulated"),)
    file = write(tmp_path, "device: paced\n")
    assert load(Renamed, flags={}, environ={}, file=file).config.device == "emulated"


def test_error_of_an_invalid_value_names_the_deprecated_flag() -> None:
    with pytest.raises(ConfigError, match="--claim-s: must be more than 0, got 0"):
        load(Renamed, flags={"claim_s": "0"}, environ={})


def test_schema_marks_old_names_as_deprecated() -> None:
    schema = json_schema(Renamed)
    assert schema["properties"]["claim_s"]["deprecated"] is True
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"claim_s": 3, "device": "paced"})
    assert not validator.is_valid({"claim_s": 0})
