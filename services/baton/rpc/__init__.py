"""RPC layer: protobuf and gRPC, with servicer and client of each service in one module.

No other package imports grpc.
"""

import os

# grpc reads these variables when it is loaded, which happens after this.
# Without it, grpc writes a line to standard error for every closed connection.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# With fork support, grpc starts threads in every forked child before exec. One child in five then crashed or
# printed garbage.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
