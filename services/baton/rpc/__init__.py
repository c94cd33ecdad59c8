"""The wire: protobuf and gRPC around the core, servicer and client of each contract side by side. grpc lives
here and nowhere else."""

import os

# grpc's core reads these once, when it is loaded, which is after this.
# It would write a line to standard error for every connection that goes away.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# It would start threads in every fork, before its exec: one child process in five then died, or printed
# nonsense.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
