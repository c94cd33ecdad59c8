"""The memory budget of a gateway process."""

from baton.runtime.process.byte_budget import Account, ByteBudget, shares

BUDGET_WEIGHTS = {
    Account.HEADS: 1,
    Account.UNREAD_CALLS: 2,
    Account.KEYLESS_CALLS: 1,
    Account.RECEIVING: 7,
    Account.REQUESTS: 12,
    Account.UNSENT: 5,
    Account.STREAMS: 4,
}
"""Shares of the memory budget. Responses that are not streamed are collected in the account of requests."""


def gateway_budget(memory_budget: int) -> ByteBudget:
    """Return the budget of a gateway that may hold `memory_budget` bytes."""
    return ByteBudget(shares(memory_budget, BUDGET_WEIGHTS), "gateway")
