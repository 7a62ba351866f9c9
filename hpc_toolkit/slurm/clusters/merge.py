"""Merge a cluster's facts from files and variables, key by key, and record their origins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.slurm.clusters.keys import DEFAULT_KEYS, DEFAULT_OPTIONS, KEYS, MEMORY_OPTIONS
from hpc_toolkit.system import tomltable as t

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES = {f"HPCTK_{option.upper()}": option for option in DEFAULT_OPTIONS}
"""Environment variables that override a key of every cluster's ``[defaults]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value is written."""

    file: str
    """The file's name in errors, or a variable: ``$HPCTK_TIME``."""
    key: str
    """The key in the file; empty for a variable."""

    def __str__(self) -> str:
        return f"{self.file}: {self.key}" if self.key else self.file


class MergedFacts:
    """Fields of a cluster and their origins, while files are merged."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def add(self, table: dict[str, Any], file: str) -> None:
        """Override earlier values with those of ``table``; inner tables merge key by key."""
        values = t.convert(table, KEYS, file)
        for key, stated in table.items():
            field = KEYS[key][0]
            if isinstance(stated, dict):
                for inner, value in values[field]:
                    self.set_inner(field, inner, value, Origin(file=file, key=f"{key}.{inner}"))
            else:
                self.values[field] = values[field]
                self.origins[key] = Origin(file=file, key=key)

    def add_variables(self, environ: Mapping[str, str]) -> None:
        """Override ``[defaults]`` with environment variables; empty ones are ignored."""
        for variable, option in VARIABLES.items():
            text = environ.get(variable)
            if text:
                where = f"${variable}"
                number = option == "cpus_per_task" and re.fullmatch("[0-9]{1,9}", text)
                value = int(text) if number else text
                _, check = DEFAULT_KEYS[option]
                self.set_inner("defaults", option, check(value, where), Origin(file=where, key=""))

    def set_inner(self, field: str, inner: str, value: Any, origin: Origin) -> None:
        """Set one key of an inner table."""
        pairs: dict[str, Any] = self.values.setdefault(field, {})
        if field == "defaults" and inner in MEMORY_OPTIONS:
            # Slurm takes only one memory option, so a later layer's replaces an earlier one.
            for other in MEMORY_OPTIONS:
                pairs.pop(other, None)
                self.origins.pop(f"{field}.{other}", None)
        pairs[inner] = value
        self.origins[f"{field}.{inner}"] = origin

    def forget(self, table: str) -> None:
        """Drop a table that is true of the extended cluster only."""
        self.values.pop(table, None)
        self.origins = {k: v for k, v in self.origins.items() if not k.startswith(f"{table}.")}
