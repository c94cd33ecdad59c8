"""Runtime of every process: settings, logs, metrics, signals, health, failpoints. Imports only `baton.core`."""
