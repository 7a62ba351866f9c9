"""What a run came to: rows, tables, counts, one item and its life."""
