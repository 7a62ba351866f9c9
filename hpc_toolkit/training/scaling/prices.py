"""Price and power of ranks, from an option, a table or the file of the measured cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.series import money

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.training.scaling.series import Series


def priced(
    series: Series, *, price_per_gpu_hour: float | None = None, cluster: str | None = None
) -> Series:
    """Return the series with prices and power, and with notes on their sources.

    A given price replaces every other price. ``cluster`` is the cluster whose file is read instead
    of the measured one's; prices of a table are kept. Without it only the file of the cluster that
    the records name is read: this machine may belong to another cluster.

    Raises ConfigError if ``cluster`` cannot be loaded.
    """
    site, why = _site(series, cluster)
    series, of_price = _with_price(series, price_per_gpu_hour, site)
    series, of_power = _with_power(series, site)
    return replace(series, notes=(*series.notes, *(of_price or why), *of_power))


def _site(series: Series, given: str | None) -> tuple[Cluster | None, list[str]]:
    """Return the cluster whose file is used, and notes on why there is none."""
    from hpc_toolkit.slurm.clusters.facts import load_cluster
    from hpc_toolkit.slurm.clusters.partitions import named_site

    name = given or series.cluster
    if not name:
        return None, []
    try:
        return named_site(load_cluster(name), series.partition), []
    except ConfigError as error:
        if given:
            raise
        return None, [f"no price: it was measured on {name}: {error.message}"]


def _with_price(
    series: Series, given: float | None, site: Cluster | None
) -> tuple[Series, list[str]]:
    if given is not None:
        currency = series.currency or (site.currency if site is not None else "")
        told = f"price: {money(f'{given:g}', currency)} per GPU-hour, by --price-per-gpu-hour"
        return replace(series.at_price(given, "world_size"), currency=currency), [told]
    if site is None or any(point.price_per_hour is not None for point in series.points):
        return series, []
    node = site.price_per_node_hour
    if series.device == "cpu":
        parts, unit = {"price_per_node_hour": node}, "node and hour"
        missing = "price_per_node_hour, and ranks used CPUs"
    else:
        # A job uses a part of a node, and pays for that part.
        share = node / site.gpus_per_node if node is not None and site.gpus_per_node else None
        parts = {"price_per_gpu_hour": site.price_per_gpu_hour, "price_per_node_hour": share}
        unit, missing = "GPU-hour", "price_per_gpu_hour"
    known = {key: part for key, part in parts.items() if part is not None}
    if not known:
        return series, [f"no price: {site.file} has no {missing}"]
    each = sum(known.values())
    found = series.at_price(each, "nodes" if series.device == "cpu" else "world_size")
    where = " and ".join(map(site.written, known))
    told = f"price: {money(f'{each:g}', site.currency)} per {unit}, by {where}"
    return replace(found, currency=site.currency), [told, *_elsewhere(series, site)]


def _elsewhere(series: Series, site: Cluster) -> list[str]:
    """Return notes if a price is for another cluster or another GPU than the measured one."""
    if not series.device:
        return []
    notes = []
    if series.cluster not in (site.name, site.argument):
        where = series.cluster or "a machine whose cluster no record names"
        notes.append(f"it was measured on {where}, and the price is of {site.name}")
    kind = site.gpu_type or ""
    if series.device != "cpu" and kind.lower() not in series.device.lower():
        notes.append(f"it was measured on {series.device}, and the price is of GPUs {kind!r}")
    return notes


def _with_power(series: Series, site: Cluster | None) -> tuple[Series, list[str]]:
    if site is None or site.watts_per_gpu is None or series.device == "cpu":
        return series, []
    if all("gpu_power_w" in point.details for point in series.points):
        return series, []
    where = site.written("watts_per_gpu")
    told = f"power: {site.watts_per_gpu:g} W per GPU where none was measured, by {where}"
    return replace(series, watts_per_gpu=site.watts_per_gpu), [told]
