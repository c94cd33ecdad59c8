"""Buffers that share an account: the largest is cut off when it is full."""

import pytest

from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget
from baton.runtime.process.shared_account import SharedAccount


def shared(limit: int = 100) -> SharedAccount:
    return SharedAccount(ByteBudget({Account.STREAMS: limit}), Account.STREAMS, "the stream")


def test_largest_buffer_is_cut_for_a_smaller_one() -> None:
    account, cut = shared(), list[OverBudget]()
    large, small = account.open(cut.append), account.open(pytest.fail)
    large.add(80)
    small.add(30)
    assert [str(each) for each in cut] == [
        "the stream needs 30 bytes; 20 of 100 bytes for streams are free; retry later"
    ]
    assert (large.num_bytes, small.num_bytes, account.budget.used(Account.STREAMS)) == (0, 30, 30)


def test_largest_buffer_cannot_grow_further() -> None:
    account = shared()
    large, small = account.open(pytest.fail), account.open(pytest.fail)
    small.add(20)
    large.add(80)
    with pytest.raises(OverBudget):
        large.add(1)
    assert (large.num_bytes, small.num_bytes) == (80, 20)


def test_closed_buffer_takes_no_bytes() -> None:
    account = shared()
    buffer = account.open(pytest.fail)
    buffer.add(50)
    buffer.remove(20)
    assert buffer.num_bytes == 30
    buffer.close()
    buffer.close()
    buffer.add(50)
    buffer.remove(10)
    assert account.budget.used(Account.STREAMS) == 0
