"""Slurm jobs of a run: submit, record, follow and cancel them."""
