"""State of the engine: sequences, step plans, outcomes, configuration."""
