"""Ranks as Ray actors."""
