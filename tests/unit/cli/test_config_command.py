import json

import jsonschema
import pytest
from click.testing import CliRunner

from baton.cli.main import cli
from baton.runtime.config.settings import ALL_ALIASES, ALL_NAMES

SECRET = "redis://:hunter2@h:1/0"


@pytest.mark.parametrize("output_flags", [[], ["--json"]])
def test_config_masks_passwords(output_flags: list[str]) -> None:
    done = CliRunner().invoke(cli, ["config", *output_flags, "--redis-url", SECRET])
    assert "hunter2" not in done.output
    assert "redis://:***@h:1/0" in done.output


def test_each_row_shows_the_source_of_its_value() -> None:
    done = CliRunner().invoke(cli, ["config"], env={"BATON_PREFILL": "3"})
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["prefill"] == ["3", "BATON_PREFILL"]
    assert rows["decode"] == ["1", "default"]


def test_unknown_environment_variable_gives_a_warning() -> None:
    done = CliRunner().invoke(cli, ["config"], env={"BATON_PREFIL": "3"})
    assert done.exit_code == 0
    assert (
        done.stderr.splitlines()[0] == "warning: unknown environment variable BATON_PREFIL; did you mean BATON_PREFILL?"
    )


def test_schema_has_every_setting_and_rejects_unknown_keys() -> None:
    schema = json.loads(CliRunner().invoke(cli, ["config", "--schema"]).stdout)
    assert schema["properties"].keys() == ALL_NAMES | ALL_ALIASES
    assert {key for key, shape in schema["properties"].items() if shape.get("deprecated")} == ALL_ALIASES
    jsonschema.validate({"http_port": 1, "kv_memory": "1GiB"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"http_prot": 1}, schema)
