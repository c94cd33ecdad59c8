"""What the gateway knows of the cluster: schedulers, workers, and sessions with them."""
