"""Ranks that train together: start them, measure them, compare their scaling."""
