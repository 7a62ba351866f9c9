"""Charts, pages and terminal views of a run."""
