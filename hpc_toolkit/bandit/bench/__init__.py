"""Policies compared by searches on scores that are known already."""
