"""The checks of `baton doctor`."""
