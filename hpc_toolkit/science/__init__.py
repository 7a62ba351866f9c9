"""Representation metrics, and workloads that run models on texts."""
