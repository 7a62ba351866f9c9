"""The tests; a package, so that they can share what plays a run."""
