"""Values that the scheduler exchanges with workers and gateways: reports, queries, placements, records."""
