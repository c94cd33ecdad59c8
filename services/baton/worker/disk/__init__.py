"""The file in which a worker keeps copies of KV blocks: its format and checks, reads and writes."""
