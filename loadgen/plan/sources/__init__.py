"""Sources of plans: synthetic workloads, recorded traces, fitted arrivals and recorded conversations."""
