"""Ranks of a training script: where they meet, who starts them, and how they start again.

The agent, the watching of ranks, their logs' redirection and the options are those of
torch.distributed's elastic launcher. What is ours: the place where nodes meet, which is new in
every round; what a signal does; and exit codes.
"""
