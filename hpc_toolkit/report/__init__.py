"""Pictures of what a run, a plan or a measurement found."""
