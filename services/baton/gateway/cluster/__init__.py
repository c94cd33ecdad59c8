"""The gateway's connections to schedulers and workers, and its view of the cluster."""
