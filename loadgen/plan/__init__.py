"""Plans: which requests are sent, when, and with what prompt."""
