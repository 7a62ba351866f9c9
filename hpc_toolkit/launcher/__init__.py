"""Ranks of a training script: where they meet, who starts them, and how they start again."""
