"""One training on several numbers of ranks, measured and compared."""
