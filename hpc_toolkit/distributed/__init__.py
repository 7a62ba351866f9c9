"""What a training script needs of torch.distributed."""
