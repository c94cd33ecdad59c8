"""Generated from proto/baton/v1; `make proto` writes it anew."""
