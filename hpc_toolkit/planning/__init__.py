"""What the rest of a run would take."""
