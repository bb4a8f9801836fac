"""Pallas kernels, one folder an operation; the XLA reference in each folder is its definition."""
