"""The kernels' sources, in Numba. Imported only when machine code has to be made: a warm process never imports Numba."""
