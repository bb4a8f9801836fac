"""Experiment settings, one file a method: `get_config(variant)` returns an `ml_collections.ConfigDict`."""
