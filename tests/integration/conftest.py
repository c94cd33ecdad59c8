"""What every test with processes shares."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_transport_settings_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes do not get the `UCX_` variables that a NIXL backend of an earlier test has set in this
    process."""
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)
