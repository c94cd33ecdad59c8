"""Generated code of the internal protobuf package `baton.wire.v1`; the gRPC code around it is `baton.rpc`."""
