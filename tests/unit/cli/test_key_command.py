"""`baton key`: a new key is printed once, and the key file has its hash only."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli
from baton.core.errors import BatonError, ConfigError, Refused
from baton.gateway.auth.api_keys import KeyRing, Keys
from baton.gateway.auth.key_file import read_keys, reload_keys, watch_key_file
from baton.runtime.process.watched_files import WatchedFiles


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["key", *args])


def new_key(file: Path, name: str, *more: str) -> str:
    done = run("new", str(file), "--name", name, *more)
    assert done.exit_code == 0, done.output
    return done.output.strip()


def test_new_keys_identify_callers_until_they_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    alice = new_key(file, "alice", "--tenant", "search", "--max-open-requests", "4")
    bob = new_key(file, "bob", "--admin", "--requests-per-minute", "60")
    assert alice not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    ring = KeyRing(read_keys(file))
    assert (ring.identify(f"Bearer {alice}").tenant, ring.identify(f"Bearer {alice}").max_open_requests) == (
        "search",
        4,
    )
    assert (ring.identify(f"Bearer {bob}").tenant, ring.identify(f"Bearer {bob}").is_admin) == ("bob", True)
    salt = ring.identify(f"Bearer {bob}").cache_salt
    assert run("remove", str(file), "alice").exit_code == 0
    remaining = KeyRing(read_keys(file))
    assert remaining.identify(f"Bearer {bob}").cache_salt == salt
    with pytest.raises(Refused):
        remaining.identify(f"Bearer {alice}")
    assert list(tmp_path.iterdir()) == [file], "a temporary file is left"


def test_invalid_arguments_are_reported_and_the_file_is_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    new_key(file, "alice")
    before = file.read_text()
    for arguments, message in (
        (("new", str(file), "--name", "alice"), "same `name`"),
        (("new", str(file), "--name", "a b"), "`name` is 'a b'; must be"),
        (("remove", str(file), "bob"), "no key called 'bob'; it has alice"),
        (("remove", str(file), "alice"), "the last key"),
        (("new", str(tmp_path / "missing" / "keys.yaml"), "--name", "x"), "cannot write"),
        (("remove", str(tmp_path / "none.yaml"), "x"), "cannot read"),
    ):
        done = run(*arguments)
        assert isinstance(done.exception, BatonError), done.output
        assert message in str(done.exception)
    assert file.read_text() == before


def test_error_names_a_missing_or_invalid_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match=r"keys\.yaml: No such file"):
        read_keys(file)
    file.write_text("keys: []\n")
    with pytest.raises(ConfigError, match=r"keys\.yaml: `salt` must be"):
        read_keys(file)


async def wait_until_known(ring: KeyRing, key: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                ring.identify(f"Bearer {key}")
            except Refused:
                await asyncio.sleep(0.01)
            else:
                return


async def test_gateway_reloads_a_changed_key_file_and_keeps_its_keys_while_it_is_invalid(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    alice = new_key(file, "alice")
    num_reads = 0

    def read() -> Keys:
        nonlocal num_reads
        num_reads += 1
        return read_keys(file)

    watched = WatchedFiles(read, file, event="api_keys_not_read")
    ring = KeyRing(watched.value)
    reloading = asyncio.create_task(reload_keys(watched, ring, interval_s=0.01))

    async def wait_until_read_again() -> None:
        before = num_reads
        async with asyncio.timeout(60):
            while num_reads < before + 2:  # noqa: ASYNC110 - the first one may have begun before
                await asyncio.sleep(0.01)

    bob = await asyncio.to_thread(new_key, file, "bob")
    await wait_until_known(ring, bob)
    good = file.read_text()
    for broken in ("keys: [", ""):
        file.write_text(broken)
        await wait_until_read_again()
        assert ring.identify(f"Bearer {alice}").name == "alice"
        assert ring.identify(f"Bearer {bob}").name == "bob"
    file.unlink()
    await wait_until_read_again()
    assert ring.identify(f"Bearer {alice}").name == "alice"
    file.write_text(good)
    eve = await asyncio.to_thread(new_key, file, "eve")
    await wait_until_known(ring, eve)
    assert ring.identify(f"Bearer {eve}").name == "eve"
    reloading.cancel()


async def test_change_between_reading_and_watching_is_loaded(tmp_path: Path) -> None:
    """A gateway reads its keys first and starts to watch the file when all other parts have started."""
    file = tmp_path / "keys.yaml"
    new_key(file, "alice")
    watched = watch_key_file(file)
    ring = KeyRing(watched.value)
    bob = new_key(file, "bob")
    reloading = asyncio.create_task(reload_keys(watched, ring, interval_s=0.01))
    await wait_until_known(ring, bob)
    assert ring.identify(f"Bearer {bob}").name == "bob"
    reloading.cancel()


def test_new_key_keeps_the_mode_of_the_file(tmp_path: Path) -> None:
    """Otherwise a gateway of another user could not read the new keys."""
    file = tmp_path / "keys.yaml"
    new_key(file, "alice")
    file.chmod(0o640)
    new_key(file, "bob")
    assert file.stat().st_mode & 0o777 == 0o640
