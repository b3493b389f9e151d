"""The CPU backend: launchers on torch tensors here, the kernels' sources in `native`, a file of each name in both."""
