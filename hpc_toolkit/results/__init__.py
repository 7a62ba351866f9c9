"""Results of a run: rows, tables, status counts, and the history of one item."""
