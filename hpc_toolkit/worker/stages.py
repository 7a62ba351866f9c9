"""The stages of a new run: how their functions are called with items, and which stages follow.

A function gets the item, or the keys of the item as arguments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import Parameter
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError, ItemsError, WorkloadError, near_miss
from hpc_toolkit.queue.items import Item, ItemLines, check_items, has_key
from hpc_toolkit.queue.wants import NEEDS, PRIORITY, Arrows, Wants
from hpc_toolkit.rundir.layout import BY_ITEM, BY_NAME, RESULTS, Manifest, StageSpec, list_stage
from hpc_toolkit.system.jsonlines import AT_ONCE, batches
from hpc_toolkit.system.record import replace
from hpc_toolkit.worker.code import collect_provenance
from hpc_toolkit.worker.command import needed_keys
from hpc_toolkit.worker.loading import caller_path, check_stage, is_callable_class, load_object

_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def fit(
    stage: StageSpec, items: Iterable[Any], *, dropped: str = "", given: str = ""
) -> tuple[StageSpec, Iterator[Any]]:
    """The stage with how its function is called, and the items, which are checked against it.

    The first items decide: the function gets their keys by name if all fit its parameters, else the
    item itself; the key ``dropped`` only if it is a parameter. ``given`` is a parameter that gets
    an argument although the items lack it. Raises WorkloadError: an item fits neither; the message
    names the key.
    """
    work, rest = stage.workload, iter(items)
    found = _parameters(work.function, work.path) if work.function is not None else None
    if found is None:
        return stage, rest
    first, name = list(islice(rest, AT_ONCE)), str(work.function)
    keys = {key for item in first if isinstance(item, dict) for key in item}
    if given not in keys:
        found = [one for one in found if one.name != given]
    # A wrapper that takes anything does not say how the function inside of it is called.
    is_wrapper = {one.kind for one in found} >= {_REST[0]} and not _names(found)
    by_name = bool(first) and not is_wrapper and not any(_misfit(name, found, i) for i in first)
    if not by_name and dropped and dropped not in _names(found):
        own = [{key: item[key] for key in item if key != dropped} for item in first]
        if not any(_misfit(name, found, item) for item in own):
            call = f"{BY_NAME} but {dropped}"
            return replace(stage, workload=replace(work, call=call)), iter(own)
    by_name = by_name or not _takes_item(found, keys)
    stage = replace(stage, workload=replace(work, call=BY_NAME if by_name else BY_ITEM))
    return stage, _checked(name, found, chain(first, rest), by_name=by_name)


def with_items(
    stage: StageSpec, items: Iterable[Any], *, may_be_empty: bool = False
) -> tuple[StageSpec, ItemLines]:
    """A stage with its list, and with how its function is called.

    If items of the list follow each other, the stage follows itself. Raises ItemsError,
    ConfigError, WorkloadError: items that cannot work.
    """
    arrows, wants, needs = Arrows(), Wants(stage), needed_keys(stage.workload.command)
    stage, items = fit(stage, wants.taken(arrows.taken(items)), given=RESULTS)
    own = [key for key in needs if key.partition(".")[0] != RESULTS]
    lines = check_items(items, group_by=stage.group_by, needs=own, may_be_empty=may_be_empty)
    lines.wants = wants.each(len(lines))
    if lines.wants and stage.needs is None:
        stage = replace(stage, needs={})  # by which workers know that items have needs
    of_command = own != needs
    wanted = of_command or _wants_results(stage)
    if arrows and may_be_empty:
        message = "items that follow each other cannot be in an open list"
        raise ConfigError(message, hint="create the run without --open")
    if arrows:
        from hpc_toolkit.queue.graph import GraphLines  # few lists have one

        results = wanted is not False
        edges = arrows.edges(lines.lines, results=results)
        return replace(stage, after=(stage.name,)), GraphLines(lines, *edges, results=results)
    if of_command or wanted is None:
        for number, line in enumerate(lines.lines):
            if RESULTS not in (item := json.loads(line)):
                user = stage.workload.function or "the command"
                message = f"item {number} has no key {RESULTS!r}, which {user} needs"
                raise ItemsError(message, hint=near_miss(RESULTS, list(item)))
    return stage, lines


def _wants_results(stage: StageSpec) -> bool | None:
    """Whether code gets results of items before; None: it cannot be called without them."""
    work = stage.workload
    if work.command is not None or work.call != BY_NAME:
        return work.command is None
    found = [one for one in _parameters(str(work.function), work.path) or () if one.name == RESULTS]
    return None if found and found[0].default is found[0].empty else bool(found)


def _parameters(name: str, path: tuple[str, ...]) -> list[Parameter] | None:
    """The parameters of a function; None for a class with ``run``, and if they are not known."""
    with caller_path():
        found: Any = load_object(name, path)
    is_class = isinstance(found, type)
    if is_class and not is_callable_class(found):
        return None
    try:
        signature = inspect.signature(found.__call__ if is_class else found)
    except (TypeError, ValueError):
        return None
    return [*signature.parameters.values()][is_class:]


def _names(parameters: list[Parameter]) -> list[str]:
    return [one.name for one in parameters if one.kind in _NAMED]


def _takes_item(parameters: list[Parameter], keys: Collection[str]) -> bool:
    """Whether a function can be called with the item alone, and its parameter is not a key.

    A parameter that cannot be given by name, ``def f(item, /)``, is the item also if it is a key.
    """
    if not parameters or parameters[0].kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
        return False
    first, *others = parameters
    more = any(one.default is one.empty and one.kind not in _REST for one in others)
    is_item = first.kind is Parameter.POSITIONAL_ONLY and first.default is first.empty
    return not more and (is_item or first.kind in _REST or first.name not in keys)


def _misfit(function: str, parameters: list[Parameter], item: Any) -> tuple[str, str] | None:
    """Why the keys of an item cannot be the arguments of a function, and a hint; None: they can."""
    names = _names(parameters)
    if not isinstance(item, dict) or not all(isinstance(key, str) for key in item):
        return None  # check_items() refuses it
    for one in parameters:
        if one.kind is Parameter.POSITIONAL_ONLY:
            why = f"cannot be given to {function}, which takes {one.name!r} by position only"
            return why, "remove the / from its parameters"
        if one.default is one.empty and one.kind not in _REST and one.name not in item:
            return f"has no key {one.name!r}, which {function} needs", near_miss(
                one.name, list(item)
            )
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in parameters)
    for key in item:
        if key not in names and not takes_any:
            hint = f"define it as ({', '.join(item)}), or (item) for the whole item"
            why = f"has the key {key!r}, which {function} does not take"
            return why, near_miss(key, names) if names else hint
    return None


def _checked(
    function: str, parameters: list[Parameter], items: Iterable[Any], *, by_name: bool
) -> Iterator[Any]:
    seen: set[tuple[Any, ...]] = set()
    first = 0
    for some in batches(items):
        # Most items have the keys of others: to look at each takes as long as to write it.
        if not ({dict}.issuperset(map(type, some)) and seen.issuperset(map(tuple, some))):
            for number, item in enumerate(some, first):
                if isinstance(item, dict) and tuple(item) not in seen:
                    _check(f"item {number}", function, parameters, item, by_name=by_name)
                    seen.add(tuple(item))
        first += len(some)
        yield from some


def _check(
    where: str, function: str, parameters: list[Parameter], item: dict[str, Any], *, by_name: bool
) -> None:
    fault = _misfit(function, parameters, item) if by_name else None
    if not by_name and not _takes_item(parameters, item):
        name = parameters[0].name
        why = f"has the key {name!r}, but {function} would get the whole item as {name!r}"
        fault = why, "give all items keys that fit, or rename the parameter"
    if fault:
        raise WorkloadError(f"{where} {fault[0]}", hint=fault[1])


def manifest_of(
    root: str | Path, stages: Mapping[str, Mapping[str, Any]], *, copy_code: bool
) -> tuple[Manifest, dict[str, ItemLines]]:
    """The manifest of a new run of stages, and their given items; see :meth:`Run.create`.

    Raises ItemsError, ConfigError, WorkloadError: a stage cannot work; the message names it.
    """
    specs: dict[str, StageSpec] = {}
    items: dict[str, ItemLines] = {}
    keys: dict[str, tuple[set[str], bool]] = {}
    for name in _in_order(stages):
        given = dict(stages[name])
        source = given.pop("items", None)
        after, by, expand = _after(given), given.pop("by", None), given.pop("expand", False)
        _check_source(name, source, after, by)
        changes = {"after": after, "by": None if by is None else tuple(by), "expand": expand}
        try:
            spec = replace(list_stage(**given), name=name, **changes)
            if after:
                keys[name] = _keys_after(spec, specs, keys)
                specs[name] = _fitted(spec, *keys[name])
            else:
                specs[name], items[name], keys[name] = _with_items(spec, source)
        except (ConfigError, ItemsError, WorkloadError) as error:
            raise type(error)(f"stages.{name}: {error.message}", hint=error.hint) from error
        except ValueError as error:  # of its name
            raise ConfigError(f"stages.{name}: {error}", hint="rename the stage") from error
    origin = collect_provenance(tuple(specs.values())) | {"copied": copy_code}
    manifest = Manifest(run=Path(root).name, stages=tuple(specs.values()), provenance=origin)
    return manifest, items


def _after(given: dict[str, Any]) -> tuple[str, ...]:
    found = given.pop("after", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _in_order(stages: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The names of the stages, each behind those that it follows."""
    if not stages:
        raise ConfigError(
            "a run needs a stage", hint="such as stages.train with items and a workload"
        )
    before = {name: _after(dict(given)) for name, given in stages.items()}
    for name, some in before.items():
        for one in some:
            if one not in before:
                message = f"stages.{name}.after: there is no stage {one!r}"
                raise ConfigError(message, hint=near_miss(one, list(before)))
    done: list[str] = []
    while len(done) < len(before):
        free = [one for one in before if one not in done and set(before[one]) <= set(done)]
        if not free:
            circle = [one for one in before if one not in done]
            message = f"stages.{circle[0]}.after: {', '.join(circle)} wait for each other"
            raise ConfigError(
                message, hint="remove one of these names, so that a stage comes first"
            )
        done += free[:1]
    yield from done


def _check_source(name: str, items: object, after: tuple[str, ...], by: object) -> None:
    if (items is None) == (not after):
        message = f"stages.{name} needs either items or the stages that it follows"
        raise ConfigError(message, hint="such as grid = { seed = '0:4' }, or after = 'train'")
    if by is not None and not after:
        message = f"stages.{name}.by is for a stage that follows others"
        raise ConfigError(message, hint="leave 'by' out, or add 'after'")
    if len(after) > 1 and by is None:
        message = f"stages.{name} follows {' and '.join(after)}, so it needs 'by'"
        raise ConfigError(message, hint="by = [] makes one item of all results")


def _keys_after(
    spec: StageSpec, specs: dict[str, StageSpec], keys: dict[str, tuple[set[str], bool]]
) -> tuple[set[str], bool]:
    """The keys that all items of a stage will have, and whether there may be others."""
    some, more = set(), False
    for name in spec.after:
        known, opened = keys[name]
        expands = specs[name].expand
        if name in known and spec.by is None and not expands:
            message = f"after {name!r}: its items have a key of that name"
            raise ConfigError(message, hint="rename the stage or the key")
        for key in () if opened or expands else set(spec.by or ()) - known:
            message = f"by: the items of {name!r} have no key {key!r}"
            raise ConfigError(message, hint=near_miss(key, sorted(known)))
        more |= opened or expands
        if spec.by is None:
            return known | (set() if expands else {name}), more
        some |= {*spec.by, name}
    return some, False


def _fitted(spec: StageSpec, keys: set[str], more: bool) -> StageSpec:
    """The stage with how its function is called; ConfigError, WorkloadError: keys are missing."""
    check_stage(spec)
    needed = [key for key in needed_keys(spec.workload.command) if not has_key(keys, key)]
    if spec.group_by is not None and spec.group_by not in keys:
        needed.append(spec.group_by)
    for key in needed:
        if not more:
            raise ConfigError(f"its items have no key {key!r}", hint=near_miss(key, sorted(keys)))
    sample = dict.fromkeys(sorted(keys), 0)
    if not more:
        fitted, checked = fit(spec, [sample])
        list(checked)
        return fitted
    with suppress(WorkloadError):
        return fit(spec, [sample])[0]
    return replace(spec, workload=replace(spec.workload, call=BY_NAME))


def _with_items(
    spec: StageSpec, items: Iterable[Item]
) -> tuple[StageSpec, ItemLines, tuple[set[str], bool]]:
    check_stage(spec)
    common: set[str] | None = None

    def noted() -> Iterator[Item]:
        nonlocal common
        for item in items:
            if isinstance(item, dict):
                common = set(item) if common is None else common & item.keys()
            yield item

    spec, lines = with_items(spec, noted())
    keys = (common or set()) - ({NEEDS, PRIORITY} if lines.wants else set())
    if spec.after == (spec.name,):  # its items follow each other
        from hpc_toolkit.queue.graph import GraphLines

        assert isinstance(lines, GraphLines)
        keys = keys - {"after"} | ({RESULTS} if lines.results else set())
    return spec, lines, (keys, False)
