"""Code that a job runs around its step: preflight, staging, and giving nodes back."""
