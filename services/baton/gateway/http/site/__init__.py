"""Routes beside inference: probes, metrics, models, and the documentation of the API."""
