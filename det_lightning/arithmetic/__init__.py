"""The definitions: what each operation is, on Python integers. Slow, short, and the oracle of every faster way."""
