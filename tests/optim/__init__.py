"""Tests of the optax transformations."""
