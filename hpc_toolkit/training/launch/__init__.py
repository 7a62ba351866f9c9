"""Start the ranks of a training script: rendezvous, processes, restarts and exit codes.

Of torch only its key-value store is used: nodes meet there, and so do the ranks of each round.
"""
