"""Work as Kubernetes manifests, built as data."""
