"""Faster ways to the bits that `arithmetic` defines, one backend a folder; `dispatch` chooses."""
