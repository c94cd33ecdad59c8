"""Shell completion of commands, flags and values. The protocol with the shell is click's."""

from click.shell_completion import BashComplete

from baton.cli.main import cli


def completions(line: str) -> list[str]:
    """Return the completions of a command line's last word."""
    *words, incomplete = line.split(" ")
    return [
        item.value for item in BashComplete(cli, {}, "baton", "_BATON_COMPLETE").get_completions(words[1:], incomplete)
    ]


def test_commands_and_flags_are_completed() -> None:
    assert completions("baton s") == ["scheduler", "status"]
    assert completions("baton up --max-num") == ["--max-num-seqs", "--max-num-batched-tokens"]


def test_choices_of_a_setting_are_completed() -> None:
    assert completions("baton up --dtype ") == ["auto", "bfloat16", "float16", "float32"]
    assert completions("baton up --dtype float") == ["float16", "float32"]
    assert completions("baton worker --role p") == ["prefill"]
    assert completions("baton model init --like qwen") == ["qwen3-0.6b", "qwen3-4b", "qwen3-8b"]


def test_directory_completion_is_delegated_to_the_shell() -> None:
    (item,) = BashComplete(cli, {}, "baton", "_BATON_COMPLETE").get_completions(["up", "--log-dir"], "lo")
    assert item.type == "dir"
