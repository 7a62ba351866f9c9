"""Measure one training on several numbers of ranks, and compare them."""
