"""Checks of names, texts and links that `make check` runs; each is a function from the repository to a list of problems."""
