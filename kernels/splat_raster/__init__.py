"""Compositing of 2D Gaussians, front to back: brute-force reference, tiled XLA form, and a Pallas kernel."""
