"""Process-level runtime: signals, event loop, CPU cores, drain socket."""
