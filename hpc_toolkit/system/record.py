"""Classes of named values, like dataclasses, which cost little when a program starts.

For each class, ``dataclasses`` compiles up to seven functions, and it imports ``inspect``. For the
classes of ``hpctk status`` that took twice as long as Python's own start. Records share the
functions below instead (docs/decisions/libraries.md).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, dataclass_transform

T = TypeVar("T")
R = TypeVar("R", bound="Record")


class _Fresh:
    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def fresh(*, factory: Callable[[], T]) -> T:
    """A default that is made anew for each record: ``options: dict = fresh(factory=dict)``."""
    return cast("T", _Fresh(factory))


@dataclass_transform(frozen_default=True, field_specifiers=(fresh,))
class _RecordType(type):
    """Turns the annotated names of a class into slots, and their values into defaults."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **settings: bool
    ) -> Any:
        fields = tuple(body.get("__annotations__", ()))
        values = {field: body.pop(field) for field in fields if field in body}
        if not settings.get("frozen", True):
            body |= {"__setattr__": object.__setattr__, "__hash__": None}
        slots = (*fields, "__dict__") if settings.get("stateful") else fields
        made: Any = super().__new__(cls, name, bases, {**body, "__slots__": slots})
        made.fields = fields
        made._positional = () if settings.get("kw_only") else fields
        made._factories = {n: v.factory for n, v in values.items() if isinstance(v, _Fresh)}
        made._defaults = {n: v for n, v in values.items() if n not in made._factories}
        made._setters = [vars(made)[field].__set__ for field in fields]
        return made

    def __init__(cls, *_class: Any, **_settings: bool) -> None:
        """Take ``frozen`` (true by default), ``kw_only`` and ``stateful``, and do nothing."""


class _DataclassFields:
    """Describes the fields as ``dataclasses`` does, whose functions take records as well."""

    def __get__(self, _record: object, kind: type[Record]) -> dict[str, Any]:
        return _dataclass_fields(kind)


@cache
def _dataclass_fields(kind: type[Record]) -> dict[str, Any]:
    from dataclasses import make_dataclass

    made: Any = make_dataclass(kind.__name__, kind.fields)
    return cast("dict[str, Any]", made.__dataclass_fields__)


class Record(metaclass=_RecordType):
    """Base of such classes: ``class Row(Record)``, or ``(Record, frozen=False, kw_only=True)``.

    A class names all fields itself: records are not inherited from. A method ``__post_init__``
    may check the values. A class that is ``stateful`` may set further attributes there.
    """

    if TYPE_CHECKING:
        fields: ClassVar[tuple[str, ...]]
    else:
        __dataclass_fields__ = _DataclassFields()

    def __init__(self, *values: Any, **named: Any) -> None:
        kind: Any = type(self)
        if named or not len(values) == len(kind._positional) == len(kind._setters):
            values = kind._complete(values, named)
        for setter, value in zip(kind._setters, values, strict=True):
            setter(self, value)
        self.__post_init__()

    @classmethod
    def _complete(cls, values: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The values of all fields, with the defaults of those that were not given."""
        kind: Any = cls
        given = kind._defaults | dict(zip(kind._positional, values, strict=False)) | named
        for name, factory in kind._factories.items():
            if name not in given:
                given[name] = factory()
        # Of equal length, the names are the same or one is missing, which raises KeyError.
        if len(given) == len(cls.fields) and len(values) <= len(kind._positional):
            with suppress(KeyError):
                return [given[name] for name in cls.fields]
        raise TypeError(f"{cls.__name__} takes {', '.join(cls.fields)}, not {', '.join(given)}")

    def __post_init__(self) -> None:
        """Check the values; nothing to check here."""

    def __setattr__(self, name: str, _value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed, so {name!r} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[Callable[[], Record], tuple[()]]:
        """Make copies by the constructor: the default would set fields of a frozen record."""
        return partial(type(self), **_named(self)), ()


def _named(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.fields}


def _values(record: Any) -> tuple[Any, ...]:
    return tuple([getattr(record, name) for name in record.fields])


def replace(record: R, **changes: Any) -> R:
    """A copy of a record with some values changed."""
    return type(record)(**{**_named(record), **changes})


def asdict(record: Record) -> dict[str, Any]:
    """The values of a record by name; records inside of it become dicts as well."""
    return {name: _plain(value) for name, value in _named(record).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value
