"""The live view and the cluster's metrics, served at a gateway's admin port."""
