"""Plans workers for the cores and GPUs of this machine, and builds a whole cluster in one process."""
