"""Starts and supervises the processes of a cluster: services as child processes, workers as Ray actors."""
