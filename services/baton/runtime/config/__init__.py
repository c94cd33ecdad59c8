"""Settings: declaration, parsing, sources and defaults."""
