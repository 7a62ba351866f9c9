"""The tests; a package, so that they can share the modules that imitate a run."""
