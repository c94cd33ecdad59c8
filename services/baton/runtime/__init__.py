"""What every process needs: settings, logs, metrics, signals, health, failpoints. Rank 1: imports
`baton.core` only."""
