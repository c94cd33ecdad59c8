"""What the shell offers after TAB; the shells' own protocol is the command-line library's."""

from click.shell_completion import BashComplete

from baton.cli.main import cli


def offered(line: str) -> list[str]:
    """For a command line; its last word is what has been typed so far."""
    *words, incomplete = line.split(" ")
    return [
        item.value for item in BashComplete(cli, {}, "baton", "_BATON_COMPLETE").get_completions(words[1:], incomplete)
    ]


def test_commands_and_flags() -> None:
    assert offered("baton s") == ["scheduler", "status"]
    assert offered("baton up --max-num") == ["--max-num-seqs", "--max-num-batched-tokens"]


def test_the_choices_of_a_setting() -> None:
    assert offered("baton up --dtype ") == ["auto", "bfloat16", "float16", "float32"]
    assert offered("baton up --dtype float") == ["float16", "float32"]
    assert offered("baton worker --role p") == ["prefill"]
    assert offered("baton model init --like qwen") == ["qwen3-0.6b", "qwen3-8b"]


def test_a_directory_is_left_to_the_shell() -> None:
    (item,) = BashComplete(cli, {}, "baton", "_BATON_COMPLETE").get_completions(["up", "--log-dir"], "lo")
    assert item.type == "dir"
