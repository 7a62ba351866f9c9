"""Optuna studies on the workers of a run, without a database."""

from hpc_toolkit.study.studies import create, load

__all__ = ["create", "load"]
