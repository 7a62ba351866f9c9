"""What a job does around its step."""
