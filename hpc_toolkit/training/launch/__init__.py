"""Start the ranks of a training script: rendezvous, processes, restarts and exit codes.

The agent, the monitoring of ranks, the redirection of their output and the options come from
torch.distributed's elastic launcher. hpctk adds a rendezvous that is new in every round, the
handling of signals, and exit codes.
"""
