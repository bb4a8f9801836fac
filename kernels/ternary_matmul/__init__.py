"""Products with ternary weights, 2 bits each: XLA reference, int8 form for CPUs, and Pallas kernels."""
