"""A run's items and results as one file."""
