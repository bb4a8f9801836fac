"""Products with sign weights, 1 bit each: XLA reference, int8 form for CPUs, and Pallas kernels."""
