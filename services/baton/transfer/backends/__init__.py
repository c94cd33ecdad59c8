"""Transfer backends: NIXL, shared memory of one host, and staging of GPU memory through host memory."""
