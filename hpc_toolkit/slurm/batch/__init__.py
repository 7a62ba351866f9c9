"""A running job: checks of its nodes, its ranks, signals, and requeueing."""
