"""The faults of a storm, one module per kind. Each injects its kind at random times until the storm ends."""
