"""Plans of sessions, their simulation, and what their reloads took."""
