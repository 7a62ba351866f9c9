"""Other ways to start workers: Ray and Kubernetes."""
