"""The run directory: the on-disk format, and the only code that makes or syncs names in it."""
