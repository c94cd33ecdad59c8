"""The order in which idle KV is evicted: chances of its return, its owners, and tenants' retention budgets."""
