"""Optimizer steps on block-quantised states: codec, XLA reference and Pallas kernels."""
