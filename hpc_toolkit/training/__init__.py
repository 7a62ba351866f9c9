"""Ranks that train together: started, measured, compared."""
