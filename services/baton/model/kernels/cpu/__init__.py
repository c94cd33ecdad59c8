"""C++ kernels for CPUs, and the code that compiles and loads them."""
