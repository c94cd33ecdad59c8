"""Settings on the command line: errors that name the flag, and the order flag, variable, file, default."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli, main


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, args, prog_name="baton", env=env)


def effective(*args: str, env: dict[str, str] | None = None) -> dict[str, dict[str, object]]:
    done = run("config", "--json", *args, env=env)
    assert done.exit_code == 0, done.output
    shown: dict[str, dict[str, object]] = json.loads(done.stdout)
    return shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "tpu"], "'--device': expected one of auto, cpu, cuda, emulated, got 'tpu'"),
        (["--http-port", "http"], "'--http-port': expected an integer, got 'http'"),
        (["--http-port", "65536"], "'--http-port': must be at most 65535, got 65536"),
        (["--kv-memory", "much"], "'--kv-memory': 'much' is not a size such as 512MiB"),
        (["--lease-s", "0"], "'--lease-s': must be more than 0, got 0"),
        (["--modle", "demo"], "No such option '--modle'"),
    ],
)
def test_invalid_flag_is_a_usage_error_that_names_it(args: list[str], message: str) -> None:
    done = run("up", *args)
    assert done.exit_code == 2
    assert message in done.stderr


def test_unknown_flag_or_command_suggests_the_nearest() -> None:
    assert "--model" in run("up", "--modle", "demo").stderr
    assert "status" in run("statsu").stderr


def test_flag_overrides_variable_overrides_file_overrides_default(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("prefill: 2\ndecode: 2\nhybrid: 2\n")
    found = effective("--config", str(file), "--prefill", "4", env={"BATON_PREFILL": "3", "BATON_DECODE": "3"})
    assert found["prefill"] == {"value": 4, "source": "--prefill"}
    assert found["decode"] == {"value": 3, "source": "BATON_DECODE"}
    assert found["hybrid"] == {"value": 2, "source": f"{file}: hybrid"}
    assert found["http_port"] == {"value": 8000, "source": "default"}


def test_config_file_is_read_from_the_environment_variable(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("prefill: 5\n")
    assert effective(env={"BATON_CONFIG": str(file)})["prefill"]["value"] == 5


def test_no_flag_overrides_a_true_value_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("once: true\nfirst_prompt: hello\n")
    assert effective("--config", str(file))["once"]["value"] is True
    assert effective("--config", str(file), "--no-once")["once"] == {"value": False, "source": "--once"}


def test_size_with_a_unit_is_parsed() -> None:
    assert effective("--kv-memory", "512MiB")["kv_memory"]["value"] == 512 * 2**20


def error_line(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run `baton` and return the one line that it prints for a BatonError."""
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_unknown_key_of_the_file_suggests_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("http-port: 80\n")
    assert (
        error_line(capsys, "up", "--config", str(file))
        == f"baton: {file}: unknown key 'http-port'; did you mean 'http_port'?\n"
    )
    file.write_text("polcy: round_robin\n")
    assert "did you mean 'policy'?" in error_line(capsys, "scheduler", "--config", str(file))


def test_contradictory_settings_give_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no worker could decode" in error_line(capsys, "up", "--decode", "0")
    assert "cannot read the config file" in error_line(capsys, "config", "--config", "/nowhere/baton.yaml")
    assert "once needs first_prompt" in error_line(capsys, "up", "--once")


def test_deprecated_flags_and_values_work_with_a_warning() -> None:
    done = run("config", "--json", "--device", "paced", "--paced-costs", "step=1ms")
    found = json.loads(done.stdout)
    assert found["device"] == {"value": "emulated", "source": "--device"}
    assert found["emulated_costs"] == {"value": "step=1ms", "source": "--paced-costs"}
    assert "--paced-costs is deprecated and will be removed in the next release; use --emulated-costs" in done.stderr
    assert "--device: paced is deprecated and will be removed in the next release; use emulated" in done.stderr


def test_deprecated_and_new_flag_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_line(capsys, "config", "--paced-costs", "step=1ms", "--emulated-costs", "step=1ms")
    assert "--emulated-costs and --paced-costs are the same setting" in error


def test_help_hides_deprecated_flags() -> None:
    text = run("worker", "--help").output
    assert "--emulated-costs" in text
    assert "paced" not in text
