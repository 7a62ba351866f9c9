"""The JSON schema says what the reader says, so that an editor and hpctk agree."""

from __future__ import annotations

import datetime as dt
import importlib.resources
import tomllib
from typing import Any

import jsonschema
import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters.draft import draft
from hpc_toolkit.slurm.clusters.facts import cluster_names, parse_cluster
from hpc_toolkit.slurm.clusters.keys import KEYS
from hpc_toolkit.slurm.clusters.schema import cluster_schema
from tests.scontrol_outputs import MIXED, OLD_LINEAR, ROUTED

VALIDATOR = jsonschema.Draft7Validator(cluster_schema(), format_checker=jsonschema.FormatChecker())

GOOD = [
    "nodes = 1\ngpus_per_node = 0\nmin_nodes = 2\ncpus_per_node = 64\ngpu_type = 'l40s'",
    "mem_per_node = '1T'\nmax_walltime = '7-00:00:00'\nmax_array_size = 1001",
    "checked = 2026-01-19\nverified = true\nextends = 'lab'",
    "partitions = [{name = 'a', min_nodes = 2, restricted = true}]",
    "choose_partition = true\npartitions = [{name = 'a_b+c@d.e', nodes = 1}]",
    "identify = {env = 'A=b c', hostname = 'login*', slurm_cluster = 'x'}",
    "binds = ['/a', '/a:/b', '/a b:/c:ro']\nforbidden_submit_dirs = ['~', '~/x', '/home']",
    "conda_base = '/opt/conda'\ncontainer_runtime = 'pyxis'\ngpu_backend = 'gloo'",
    "env = {A = 'x'}\nfacts = {anything = 'läuft'}",
    "nccl = {NCCL_IB_HCA = 'mlx5', FI_CXI_RX_MATCH_MODE = 'software'}",
    "defaults = {time = '5', cpus_per_task = 4, account = 'a'}",
    "defaults = {mem = '0', partition = 'a,b', constraint = '[a|b]&c', qos = 'q'}",
    "setup = ['source /opt/env.sh']\nmodules = ['cuda/12.4']",
    "account_hint = 'aip-x'\naccount_required = true\nlogin_shell = true\nshrink_jobs = false",
    "price_per_gpu_hour = 2\nprice_per_node_hour = 0.6\ncurrency = 'USD'",
    "partitions = [{name = 'a', price_per_gpu_hour = 0}]",
    "node_setup = ['cp /data/env.tar /tmp']",
]

BAD = [
    *("nods = 1", "nodes = 1.5", "nodes = true", "price_per_node_hour = '2 USD'"),
    *("gpu_request = 'gpu'", "mem_style = 'none at all'", "mem_per_node = 480"),
    *("checked = '19 January'", "verified = 'yes'", "partitions = [{nodes = 1}]"),
    *("partitions = [{name = 'a', nods = 1}]", "partitions = {name = 'a'}"),
    *("identify = {host = 'x'}", "binds = '/a'", "env = {A = 1}", "defaults = {tiem = '5'}"),
    *("defaults = {cpus_per_task = '4'}", "facts = {a = {b = 'c'}}"),
]


def accepted_by_schema(text: str) -> bool:
    return not list(VALIDATOR.iter_errors(as_json(tomllib.loads(text))))


def as_json(table: dict[str, Any]) -> dict[str, Any]:
    """As editors hand it on: TOML's dates are text in JSON."""
    return {key: v.isoformat() if isinstance(v, dt.date) else v for key, v in table.items()}


def accepted_by_reader(text: str) -> bool:
    try:
        parse_cluster(text, file="site.toml", name="site")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", ["generic", "killarney", "lab"])
def test_every_builtin_file_is_valid(name: str) -> None:
    source = importlib.resources.files("hpc_toolkit.slurm") / "data" / "clusters" / f"{name}.toml"

    assert name in cluster_names()
    assert accepted_by_schema(source.read_text(encoding="utf-8"))


@pytest.mark.parametrize("told", [OLD_LINEAR, ROUTED, MIXED], ids=["old", "routed", "mixed"])
def test_every_draft_is_valid(told: Any) -> None:
    assert accepted_by_schema(draft("site", told, dt.date(2026, 11, 21)))


@pytest.mark.parametrize("text", GOOD)
def test_what_the_reader_accepts_the_schema_accepts(text: str) -> None:
    assert accepted_by_reader(text)
    assert accepted_by_schema(text)


@pytest.mark.parametrize("text", BAD)
def test_an_unknown_key_and_a_wrong_type_both_refuse(text: str) -> None:
    assert not accepted_by_reader(text)
    assert not accepted_by_schema(text)


def test_every_key_is_in_the_schema_with_a_description() -> None:
    properties = cluster_schema()["properties"]

    assert set(properties) == set(KEYS)
    assert all(one["description"] for one in properties.values())
    inner = properties["partitions"]["items"]["properties"]
    assert inner["max_walltime"]["description"].startswith("Longest job that it accepts")
    assert properties["nodes"]["description"] == "How many nodes one job can get at most."
