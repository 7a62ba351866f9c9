"""Forecast the time and cost of the rest of a run."""
