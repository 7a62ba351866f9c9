"""A search: settings, decisions, the deciding process, its outcome."""
