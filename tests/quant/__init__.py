"""Tests of number formats, quantised trees, and what is fitted to their errors."""
