"""Slurm: its programs and their output, the facts of a site, and job scripts."""
