"""The kernels' sources, in Numba. Imported only to make machine code: a warm process never imports Numba."""
