"""The commands that call a gateway: status, explain, drain."""
