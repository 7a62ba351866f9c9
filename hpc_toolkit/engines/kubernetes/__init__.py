"""Kubernetes manifests for runs and trainings."""
