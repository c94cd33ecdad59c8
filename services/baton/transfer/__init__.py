"""How KV blocks get from the worker that owns them to the worker that reads them: pulled, leased, proven."""
