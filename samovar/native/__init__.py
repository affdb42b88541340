"""The CPU kernels: a C++ library that runs a whole model step on a team of threads, and its Python side. No torch."""
