"""Code that any other package may use: processes, clocks, ranks, shares of a machine."""
