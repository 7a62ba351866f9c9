"""Compare policies by replaying searches on known scores."""
