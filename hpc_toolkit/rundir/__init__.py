"""The run directory: its on-disk format, and the only code that creates or syncs names in it."""
