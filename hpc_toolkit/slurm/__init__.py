"""Slurm's programs: questions out, records in."""
