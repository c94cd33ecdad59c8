"""The subcommands, one module each. `loadgen.cli` imports a module only when its command is called."""
