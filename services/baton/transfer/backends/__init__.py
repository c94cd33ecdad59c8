"""Transfer backends: NIXL, shared memory, and staging through host memory."""
