"""Runtime of every process: settings, logs, metrics, signals, health and failpoints."""
