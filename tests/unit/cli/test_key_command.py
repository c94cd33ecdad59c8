"""`baton key`: keys are printed once, files have hashes."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli
from baton.core.errors import BatonError, ConfigError, Refused
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.auth.key_file import read_keys, reload_keys, watch_key_file


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["key", *args])


def made(file: Path, name: str, *more: str) -> str:
    done = run("new", str(file), "--name", name, *more)
    assert done.exit_code == 0, done.output
    return done.output.strip()


def test_keys_are_made_used_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    alice = made(file, "alice", "--tenant", "search", "--max-open-requests", "4")
    boss = made(file, "boss", "--admin", "--requests-per-minute", "60")
    assert alice not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    ring = KeyRing(read_keys(file))
    assert (ring.identify(f"Bearer {alice}").tenant, ring.identify(f"Bearer {alice}").max_open_requests) == (
        "search",
        4,
    )
    assert (ring.identify(f"Bearer {boss}").tenant, ring.identify(f"Bearer {boss}").is_admin) == ("boss", True)
    salt = ring.identify(f"Bearer {boss}").cache_salt
    assert run("remove", str(file), "alice").exit_code == 0
    left = KeyRing(read_keys(file))
    assert left.identify(f"Bearer {boss}").cache_salt == salt
    with pytest.raises(Refused):
        left.identify(f"Bearer {alice}")
    assert list(tmp_path.iterdir()) == [file], "nothing else is left there"


def test_mistakes_are_reported_and_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made(file, "alice")
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


def test_a_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match=r"keys\.yaml: No such file"):
        read_keys(file)
    file.write_text("keys: []\n")
    with pytest.raises(ConfigError, match=r"keys\.yaml: `salt` must be"):
        read_keys(file)


async def until_known(ring: KeyRing, key: str) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                ring.identify(f"Bearer {key}")
            except Refused:
                await asyncio.sleep(0.01)
            else:
                return


async def test_a_gateway_sees_a_changed_file_and_keeps_what_it_had_when_it_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    alice = made(file, "alice")
    followed = watch_key_file(file)
    ring = KeyRing(followed.value)
    following = asyncio.create_task(reload_keys(followed, ring, interval_s=0.01))
    await asyncio.sleep(0.05)
    bob = await asyncio.to_thread(made, file, "bob")

    await until_known(ring, bob)
    good = file.read_text()
    for broken in ("keys: [", ""):
        file.write_text(broken)
        await asyncio.sleep(0.1)
        ring.identify(f"Bearer {alice}")
    file.unlink()
    await asyncio.sleep(0.1)
    file.write_text(good)
    eve = await asyncio.to_thread(made, file, "eve")
    await until_known(ring, eve)
    following.cancel()


async def test_what_changed_before_it_was_followed_is_seen(tmp_path: Path) -> None:
    """A gateway reads its keys first, and follows them when all else has started."""
    file = tmp_path / "keys.yaml"
    made(file, "alice")
    followed = watch_key_file(file)
    ring = KeyRing(followed.value)
    bob = made(file, "bob")
    following = asyncio.create_task(reload_keys(followed, ring, interval_s=0.01))
    await until_known(ring, bob)
    following.cancel()


def test_a_file_stays_readable_by_whom_it_was(tmp_path: Path) -> None:
    """Or a gateway of another user would go on with the keys from before."""
    file = tmp_path / "keys.yaml"
    made(file, "alice")
    file.chmod(0o640)
    made(file, "bob")
    assert file.stat().st_mode & 0o777 == 0o640
