"""What a worker publishes: reports and KV events."""
