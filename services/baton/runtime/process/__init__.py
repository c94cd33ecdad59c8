"""The process: signals, event loop, cores, drain socket."""
