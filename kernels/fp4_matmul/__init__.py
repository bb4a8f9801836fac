"""Products with weights in 4 bits, NVFP4 or MXFP4: XLA reference and Pallas kernels."""
