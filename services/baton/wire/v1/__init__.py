"""Generated from proto/baton/wire/v1 by `make proto`."""
