"""The memory budget: reservations, limits by account, and the arithmetic of a refusal."""

import pytest

from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget, shares


def make_budget(limit: int = 100) -> ByteBudget:
    return ByteBudget({Account.RECEIVING: limit, Account.UNSENT: 50})


def test_released_bytes_can_be_reserved_again() -> None:
    budget = make_budget()
    with budget.reserve(Account.RECEIVING, 100, "a body"):
        assert budget.used(Account.RECEIVING) == 100
    assert budget.used(Account.RECEIVING) == 0
    budget.reserve(Account.RECEIVING, 100, "a body")


def test_refusal_names_what_is_needed_and_what_is_free() -> None:
    budget = make_budget()
    budget.reserve(Account.RECEIVING, 60, "a body")
    with pytest.raises(
        OverBudget, match="a body needs 41 bytes; 40 of 100 bytes for receiving are free; retry later"
    ) as refused:
        budget.reserve(Account.RECEIVING, 41, "a body")
    assert refused.value.fits_later
    assert budget.used(Account.RECEIVING) == 60


def test_reservation_above_the_limit_never_fits() -> None:
    with pytest.raises(OverBudget, match="send a smaller request or raise --memory-budget") as refused:
        make_budget().reserve(Account.RECEIVING, 101, "a body")
    assert not refused.value.fits_later


def test_refused_growth_keeps_the_reservation() -> None:
    budget = make_budget()
    reservation = budget.reserve(Account.RECEIVING, 60, "a body")
    with pytest.raises(OverBudget, match="a body needs 110 bytes; 100 of 100 bytes"):
        reservation.grow(50)
    assert reservation.num_bytes == 60
    reservation.grow(40)
    assert budget.used(Account.RECEIVING) == 100


def test_shrinking_always_succeeds_and_second_release_has_no_effect() -> None:
    budget = make_budget()
    reservation = budget.reserve(Account.RECEIVING, 80, "a body")
    reservation.resize(10)
    assert budget.used(Account.RECEIVING) == 10
    reservation.release()
    reservation.release()
    assert budget.used(Account.RECEIVING) == 0


def test_accounts_do_not_share_bytes() -> None:
    budget = make_budget()
    budget.reserve(Account.RECEIVING, 100, "a body")
    budget.reserve(Account.UNSENT, 50, "a stream")
    with pytest.raises(OverBudget):
        budget.reserve(Account.REQUESTS, 1, "a request")


def test_shares_divide_the_total_by_weight() -> None:
    assert shares(1000, {Account.RECEIVING: 1, Account.REQUESTS: 3}) == {
        Account.RECEIVING: 250,
        Account.REQUESTS: 750,
    }
