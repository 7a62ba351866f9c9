"""A cluster file states facts; a slip is an error that names file and key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters.facts import (
    KEYS,
    Cluster,
    cluster_names,
    load_cluster,
    parse_cluster,
)
from hpc_toolkit.slurm.clusters.keys import PARTITION_KEYS, Partition
from tests.clusterkeys import cluster_tables


def parse(text: str) -> Cluster:
    return parse_cluster(text, file="site.toml", name="site")


def test_builtin_clusters_load_and_say_where_their_facts_are_from() -> None:
    assert cluster_names() == ["generic", "killarney", "lab"]
    for name in cluster_names():
        cluster = load_cluster(name)
        assert (cluster.name, cluster.file) == (name, f"clusters/{name}.toml")
        assert cluster.description
        assert name == "generic" or (cluster.source and cluster.checked)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"\xff\xfe", "not UTF-8"), (b"a = [", "Unclosed|Invalid|Expected")],
)
def test_load_cluster_of_an_unreadable_file_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"mine.toml: .*({message})"):
        load_cluster(str(path))


def test_load_cluster_of_an_unknown_or_unprintable_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown cluster: 'kilarney'") as caught:
        load_cluster("kilarney")
    assert "did you mean 'killarney'?" in caught.value.hint
    for name in ("a\0b", "x\n.toml", "../x\x1b/y"):
        with pytest.raises(ConfigError, match="control character"):
            load_cluster(name)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        *((f"nodes = {one}", "nodes") for one in ("0", "true", "99999999999999999999")),
        *(("nodes = 1.5", "nodes"), ("price_per_node_hour = '2 USD'", "price_per_node_hour")),
        *(("mem_style = 'none at all'", "mem_style"), ("binds = '/a'", "binds")),
        *(("partitions = {name = 'a'}", "partitions"), ("facts = {a = {b = 'c'}}", "facts")),
        *(("gpus_per_node = '4'", "gpus_per_node"), ("gpu_request = 'gpu'", "gpu_request")),
        ('gpu_type = "l40s\\n#SBATCH --evil"', "gpu_type"),
        *(("mem_per_node = 480", "mem_per_node"), ("max_walltime = '90'", "max_walltime")),
        *(("verified = 'yes'", "verified"), ("checked = 2026-01-19T00:00:00", "checked")),
        *(("source = 1", "source"), ('description = "a\\u001bb"', "description")),
        ("modules = 'cuda'", "modules"),
        ("env = ['A=1']", "env"),
        ("env = {A = 1}", r"env\.A"),
        ("defaults = 1", "defaults"),
        ("defaults = {cpus_per_task = '5'}", "defaults: cpus_per_task"),
        ("defaults = {mem = '5G', mem_per_cpu = '1G'}", "defaults: mem and mem_per_cpu exclude"),
        *(
            (f"defaults = {{{key} = {value}}}", f"defaults: {key}")
            for key, value in {"time": "'ninety'", "mem": "'lots'", "mem_per_cpu": "'0'"}.items()
        ),
        ("defaults = {account = 'a;b'}", "defaults: account"),
        ("defaults = {cpus_per_task = 5000}", "defaults: cpus_per_task"),
        ("identify = {env = 'SITE'}", "identify: env"),
        ("choose_partition = true", "choose_partition: no "),
        ("conda_base = 'opt/conda'", "conda_base"),
        ("binds = ['/data:/data:rx']", "binds"),
        ("nccl = {LD_LIBRARY_PATH = '/x'}", "nccl: LD_LIBRARY_PATH is not a variable"),
        *(("modules = ['cuda; rm']", "modules"), ("setup = ['echo $HOME']", "setup")),
        ("env = {IFS = 'x'}", "env"),
        ("env = {API_TOKEN = 'x'}", "env: API_TOKEN looks like a secret"),
        ("forbidden_submit_dirs = ['home']", "forbidden_submit_dirs"),
        ("extends = '../lab'", "extends"),
        ("partitions = ['gpu']", "partitions"),
        ("partitions = [{max_walltime = '5'}]", "partitions"),
        ("partitions = [{name = 'a b'}]", r"partitions\[1\]: name"),
        ("partitions = [{name = 'a'}, {name = 'a'}]", "partitions: 'a' is listed twice"),
        ("partitions = [{name = 'gpu', mem_per_node = 5}]", r"partitions\.gpu: mem_per_node"),
    ],
)
def test_value_out_of_range_is_refused_with_file_and_key(line: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"site\.toml: {key}") as caught:
        parse(line)

    assert caught.value.hint


@pytest.mark.parametrize(
    ("line", "where", "near"),
    [
        ("gpu_per_node = 4", "unknown key 'gpu_per_node'", "gpus_per_node"),
        ("identify = {host = 'x'}", "identify: unknown key", "hostname"),
        ("defaults = {tiem = '5'}", "defaults: unknown key", "time"),
        ("partitions = [{name='a', node=1}]", r"partitions\.a: unknown key", "nodes"),
    ],
)
def test_unknown_key_is_refused_with_its_place_and_the_near_miss(
    line: str, where: str, near: str
) -> None:
    with pytest.raises(ConfigError, match=rf"site\.toml: {where}") as caught:
        parse(line)

    assert caught.value.hint == f"did you mean {near!r}?"


def test_every_key_is_a_field_and_every_field_a_key() -> None:
    taken = {"name", "file", "argument", "origins"}

    assert {field for field, _ in KEYS.values()} == {f.name for f in fields(Cluster)} - taken
    assert {field for field, _ in PARTITION_KEYS.values()} == {f.name for f in fields(Partition)}


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


@pytest.mark.parametrize("text", GOOD)
def test_the_reader_accepts_valid_values(text: str) -> None:
    parse(text)


def test_every_key_has_a_description_for_the_reference() -> None:
    tables = {
        name: {key: about for key, _, about in rows} for name, rows in cluster_tables().items()
    }

    assert set(tables[""]) == set(KEYS)
    assert all(tables[""].values())
    longest = tables["[[partitions]]"]["max_walltime"]
    assert longest.startswith("Longest job that it accepts")
    assert tables[""]["nodes"] == "How many nodes one job can get at most."
