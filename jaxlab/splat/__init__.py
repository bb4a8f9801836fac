"""Gaussian splatting: rasteriser, compositing algebra, and training of scenes that do not fit the device (CC-GS)."""
