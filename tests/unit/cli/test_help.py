"""`baton --help` lists every command and flag with default and variable, and is fast."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

import baton
from baton.cli import up_help
from baton.cli.main import cli
from baton.cli.setting_options import SettingOption
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.setting import flag_of
from baton.runtime.config.settings import ALL_ALIASES, ClusterConfig

HEAVY = {
    "torch",
    "transformers",
    "ray",
    "grpc",
    "redis",
    "nixl",
    "huggingface_hub",
    "uvicorn",
    "starlette",
    "httpx",
    "numpy",
}

SERVICE_FLAGS = "--host --advertise-host --admin-port --redis-url --log-dir --log-level --config"
FLAGS = {
    "up": "--model --served-model-name --prefill --decode --hybrid --host --http-port --grpc-port --ray-address --redis-url "
    "--device --dtype --kv-memory --block-size-tokens --max-model-len --max-num-seqs --max-num-batched-tokens "
    "--threads-per-worker "
    "--transfer --policy --cluster --advertise-host --ray-placement --worker-start-s "
    "--log-dir --log-level --first-prompt --once --config",
    "gateway": f"{SERVICE_FLAGS} --http-port --grpc-port --model --schedulers",
    "scheduler": f"{SERVICE_FLAGS} --rpc-port --policy",
    "worker": f"{SERVICE_FLAGS} --rpc-port --kv-port-range --role --worker-id --model --schedulers --transfer",
    "fleet": "--prefill --decode --hybrid --ray-address --ray-placement --scale-with-nodes --worker-start-s --cluster "
    "--redis-url --host --admin-port --log-dir --log-level --config",
    "status": "--watch --json --gateway --url --gateway-ca --gateway-name --api-key",
    "explain": "--gateway --url --gateway-ca --gateway-name --api-key",
    "cache stats": "--json --gateway --url --gateway-ca --gateway-name --api-key",
    "cache clear": "--tenant --gateway --url --gateway-ca --gateway-name --api-key",
    "cache export": "--model --prompt --prompt-file --messages-file --tenant --out --gateway --url --gateway-ca "
    "--gateway-name --api-key",
    "cache import": "--worker --tenant --gateway --url --gateway-ca --gateway-name --api-key",
    "drain": "--here --wait --drain-socket --limit-s --gateway --url --gateway-ca --gateway-name --api-key",
    "config": "--schema --json --config --http-port",
    "doctor": "--json",
    "model init": "--like --out",
    "model fetch": "",
    "key new": "--name --tenant --admin --max-open-requests --requests-per-minute --min-priority",
    "key remove": "",
    "view": "--url --print",
}
"""The most important flags by command."""


def commands(group: click.Group = cli, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


COMMANDS = dict(commands())


def run(*args: str) -> str:
    done = CliRunner().invoke(cli, args, prog_name="baton")
    assert done.exit_code == 0, done.output
    return done.output


def test_all_commands_exist() -> None:
    assert COMMANDS.keys() == FLAGS.keys()


@pytest.mark.parametrize("name", FLAGS)
def test_important_flags_exist(name: str) -> None:
    flags = {flag for param in COMMANDS[name].params for flag in param.opts}
    assert set(FLAGS[name].split()) - flags == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_the_command_and_each_flag_with_default_and_variable(name: str) -> None:
    command = COMMANDS[name]
    text = " ".join(run(*name.split(), "--help-all" if name == "up" else "--help").split())
    assert command.help
    for param in command.params:
        if isinstance(param, click.Option) and param.hidden:
            assert param.name in ALL_ALIASES
            assert f"{param.opts[0]} " not in text
        elif isinstance(param, click.Option):
            assert param.opts[0] in text
            assert param.help
            if isinstance(param, SettingOption) or param.envvar:
                assert f"[BATON_{param.opts[0][2:].replace('-', '_').upper()}]" in param.help
                assert "Default: " in param.help
                assert " ".join(param.help.split()) in text.replace("- ", "-")


def test_help_of_up_begins_with_examples_and_shows_the_common_settings() -> None:
    text = run("up", "--help")
    lines = text.splitlines()
    assert lines.index("Examples:") < next(i for i, line in enumerate(lines) if line.startswith("Common settings"))
    shown = [line.split()[0] for line in lines if line.startswith("  --") and line.split()[0] != "--help"]
    settings = [flag_of(name) for name in up_help.COMMON]
    assert shown == [*settings, "--config", "--help-all"]
    assert len(settings) <= 16
    assert len(up_help.EXAMPLES) == 3


@pytest.mark.parametrize("command", [command for command, _ in up_help.EXAMPLES])
def test_examples_of_up_are_valid(command: str) -> None:
    name, *arguments = command.split()[1:]
    COMMANDS[name].make_context(name, arguments)


def test_each_setting_of_up_is_in_one_group_of_help_all() -> None:
    grouped = [name for names in up_help.GROUPS.values() for name in names]
    assert Counter(grouped) == Counter(item.name for item in settings_of(ClusterConfig))
    headings = [line for line in run("up", "--help-all").splitlines() if re.match(r"[A-Z].*:$", line)]
    assert headings == ["Examples:", *(f"{heading}:" for heading in up_help.GROUPS), "Options:"]


def test_help_of_a_service_lists_its_own_settings_first_and_process_settings_last() -> None:
    headings = [
        line for line in run("worker", "--help").splitlines() if line.endswith(":") and not line.startswith(" ")
    ]
    assert headings[0] == "Worker settings:"
    assert headings[-2:] == ["Process settings:", "Options:"]
    assert len(headings) == len(set(headings))


def test_version_flag_prints_the_version() -> None:
    assert run("--version") == f"baton {baton.__version__}\n"


@pytest.mark.parametrize(
    "args", [["--help"], ["up", "--help"], ["status", "--help"], ["doctor", "--help"], ["config"], ["--version"]]
)
def test_printing_commands_load_no_heavy_library(args: list[str]) -> None:
    """Help and completion must not wait for imports that only a running command needs."""
    code = (
        "import json, sys\n"
        "from baton.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print(json.dumps(sorted({HEAVY!r} & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
