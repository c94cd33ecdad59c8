"""The budget of announced turns, alone and as owners of content ask for it."""

import pytest

from baton.core.request import SessionHints
from baton.engine.retention.announced_turns import AnnouncedTurns, end_of_turn_s
from baton.engine.retention.content_owner import ContentOwner
from baton.engine.retention.content_owners import ContentOwners

CHAIN = [bytes([n]) * 16 for n in range(8)]
ROOT = b"r" * 16


def test_each_tenant_has_a_budget() -> None:
    turns = AnnouncedTurns(10, lambda: 0.0)
    assert [turns.take("t", 1, 8, 5.0), turns.take("t", 2, 8, 5.0), turns.take("u", 3, 8, 5.0)] == [8, 2, 8]
    assert turns.take("t", 4, 1, 5.0) == 0
    assert turns.num_refused == 1
    turns.release("t", 1)
    assert turns.num_blocks_of("t") == 2


def test_a_new_turn_of_an_owner_replaces_the_last_one() -> None:
    turns = AnnouncedTurns(10, lambda: 0.0)
    assert [turns.take("t", 1, 8, 5.0), turns.take("t", 1, 9, 5.0)] == [8, 9]
    assert turns.num_blocks_of("t") == 9


def test_a_turn_that_does_not_come_gives_its_blocks_back() -> None:
    now_s = 0.0
    turns = AnnouncedTurns(10, lambda: now_s)
    turns.take("t", 1, 10, 5.0)
    now_s = 5.0
    assert turns.take("t", 2, 4, 9.0) == 4


class Session:
    """A session whose requests announce the next turn in 30 s."""

    def __init__(self, turn_blocks: int) -> None:
        self.now_s = 0.0
        self.owners = ContentOwners(lambda: self.now_s, turn_blocks=turn_blocks)

    def turn(self, session: str, chain: list[bytes]) -> ContentOwner:
        hints = SessionHints(tenant="t", session=session, next_in_s=30.0)
        request = self.owners.arrived(hints, CHAIN[0])
        request.owner.leave(chain, ROOT)
        self.owners.ended(request)
        return request.owner


@pytest.mark.parametrize(("turn_blocks", "expected"), [(20, 8), (3, 3), (0, 0)])
def test_an_owner_keeps_the_chain_that_its_budget_allows(turn_blocks: int, expected: int) -> None:
    owner = Session(turn_blocks).turn("s", CHAIN)
    assert owner.chain == tuple(CHAIN[:expected])
    assert owner.has_announced_turn is (owner.next_bin is not None) is (expected > 0)


def test_an_announced_pause_without_budget_changes_no_chance() -> None:
    honest, refused = Session(0), Session(0)
    owner = honest.owners.arrived(SessionHints(tenant="t", session="s"), CHAIN[0])
    honest.owners.ended(owner)
    assert refused.owners.return_rate(refused.turn("s", CHAIN)) == honest.owners.return_rate(owner.owner)


def test_budgets_return_with_the_next_request_and_when_owners_are_forgotten() -> None:
    session = Session(10)
    session.turn("s", CHAIN)
    session.owners.arrived(SessionHints(tenant="t", session="s"), CHAIN[0])
    assert session.owners.turns.num_blocks_of("t") == 0
    few = ContentOwners(lambda: 0.0, 1, turn_blocks=10)
    for name in "ab":
        request = few.arrived(SessionHints(tenant="t", session=name, next_in_s=30.0), None)
        request.owner.leave(CHAIN[:2], ROOT)
        few.ended(request)
    assert few.turns.num_blocks_of("t") == 2


def test_a_turn_is_expected_for_half_as_long_again() -> None:
    assert end_of_turn_s(100.0, 30.0) == 146.0
