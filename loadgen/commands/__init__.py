"""The commands, one a module; `loadgen.cli` imports each only when it is called."""
