"""Generated from proto/baton/wire/v1; `make proto` writes it anew."""
