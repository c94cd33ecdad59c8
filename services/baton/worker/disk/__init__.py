"""The file in which a worker keeps copies of KV blocks: its format, its checks, and how it is read and written."""
