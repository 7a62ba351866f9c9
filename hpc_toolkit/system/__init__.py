"""What every other room may need: processes, clocks, ranks, the shares of a machine."""
