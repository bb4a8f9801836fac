"""Products with 4-bit weights and a sum of sign matrices, rounded once: XLA reference and Pallas kernels."""
