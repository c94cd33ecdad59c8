"""The order in which idle KV is evicted: chances of its return, owners, and retention budgets."""
