"""Whether the results of a run are whole."""
