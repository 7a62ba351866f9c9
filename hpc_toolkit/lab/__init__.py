"""A private real Slurm on this machine: its files, its daemons, and how they are taken down."""
