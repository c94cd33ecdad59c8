"""The nouns of Baton: plain values that every other layer speaks in. Standard library only; imports nothing
of Baton's."""
