"""The commands, one a module; `loadgen.main` imports each only when it is called."""
