"""The scheduler: places requests on workers by predicted latency."""
