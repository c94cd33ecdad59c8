"""Baton's gRPC API `baton.v1.Inference`: the channel and the client."""
