"""Kubernetes manifests for runs and trainings, built as data."""
