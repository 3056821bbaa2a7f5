"""Triton twins of the operators in `dexviz.kernels`, one operator a file: the only place that imports triton.

Nothing here holds a score map of all heads: each kernel recomputes the tiles of S that it needs from Q, K and the
log-sum-exp of each row. Products and sums are float32. Kernels carry `no_type_check`, so that the shape checks of the tests,
which would wrap them, leave them to Triton's compiler.
"""
