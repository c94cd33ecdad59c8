"""Checks of names, texts and links. Each is a function from the repository to a list of problems."""
