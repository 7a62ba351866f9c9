"""A private, real Slurm on this machine: its files, its daemons, and their shutdown."""
