"""Calls of an executor as items of a run: their items, recorded results, and other scripts."""
