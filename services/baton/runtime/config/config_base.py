"""Declares and loads settings: one flat frozen dataclass per service.

A field is declared once, with `setting(...)`. Its flag (`--http-port`), environment variable
(`BATON_HTTP_PORT`), YAML key (`http_port`), validation, help and JSON schema are derived from that
declaration. A flag takes precedence over a variable, a variable over the file, and the file over the default.
This module does not depend on a command-line library.
"""

import dataclasses
import difflib
import os
import re
import stat
import tempfile
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, dataclass_transform

import yaml

from baton.core.errors import ConfigError
from baton.runtime.config.setting import OtherForm, Setting, flag_of, variable_of

PREFIX = "BATON_"
OTHER_VARIABLES: Mapping[str, str] = {
    "BATON_CONFIG": "config file, if --config is not given",
    "BATON_GATEWAY": "gateway address for `baton status`, `explain` and `drain`, if --gateway and --url are not given",
    "BATON_RUN_DIR": "directory of the run files by which commands find a running `baton up`; unset uses "
    "$XDG_RUNTIME_DIR/baton, else ~/.cache/baton/run",
    "BATON_GATEWAY_CA": "CA file of that gateway's certificate, if --gateway-ca is not given",
    "BATON_GATEWAY_NAME": "host name in that gateway's certificate, if --gateway-name is not given",
    "BATON_API_KEY": "API key of `baton status`, `explain`, `drain` and of the first prompt of `baton up`",
    "BATON_RUN_ID": "identifies the processes that one `baton up` started",
    "BATON_FAILPOINTS": "faults to inject into this process, for tests (baton.runtime.failpoints)",
    "BATON_TEST_LONG": "run the tests at full size",
}
"""Variables with Baton's prefix that are not settings."""

# Kubernetes sets these variables in each pod for every Service in its namespace. A Service named baton-...
# produces variables with Baton's prefix.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")

T = TypeVar("T")
C = TypeVar("C", bound="Config")


def setting(
    default: T,
    *,
    help: str,  # noqa: A002 - the word of every command-line library
    unit: str = "",
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    aliases: tuple[str, ...] = (),
    value_aliases: Mapping[str, str] = types.MappingProxyType({}),
    other_form: OtherForm | None = None,
) -> T:
    """Declare a field of a `Config`.

    unit: what the number counts; an int in `bytes` may be written as `512MiB`.
    minimum, maximum: inclusive bounds. above: exclusive lower bound.
    secret: True if the value may contain a password; it is never shown or logged.
    aliases: former names, accepted for one release as flag, variable and YAML key. Using one adds a warning.
    value_aliases: former spellings of a choice, by old spelling, accepted in the same way.
    other_form: texts accepted besides the choices of a field whose type is `Literal[...] | str`.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "secret": secret,
        "aliases": aliases,
        "value_aliases": value_aliases,
        "other_form": other_form,
    }
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting,))
def config(cls: type[T]) -> type[T]:
    """Class decorator that makes a frozen, keyword-only dataclass.

    The class has no slots, so that a service can inherit several groups of fields.
    """
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@config
class Config:
    """Base class of every service's settings.

    Rules that involve several settings belong in `__post_init__` of the class that declares them, after
    `super().__post_init__()`. Raises ConfigError if a value has the wrong type or is out of range.
    """

    def __post_init__(self) -> None:
        for item in settings_of(type(self)):
            problem = item.problem(getattr(self, item.name))
            if problem:
                raise ConfigError(f"{item.name}: {problem}")


def settings_of(cls: type[Config]) -> tuple[Setting, ...]:
    """Return the settings of `cls` in order of declaration."""
    hints = typing.get_type_hints(cls)
    return tuple(
        Setting(name=field.name, default=field.default, **_kind_of(hints[field.name]), **field.metadata)
        for field in dataclasses.fields(cls)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """Loaded settings of a service with the source of each value.

    config: the validated settings.
    sources: by setting name: `--flag`, `BATON_VARIABLE`, `FILE: key` or `default`.
    warnings: unknown variables and deprecated spellings; the caller logs them once logging is configured.
    """

    config: C
    sources: Mapping[str, str]
    warnings: tuple[str, ...]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, formatted value, source) of each setting, with secrets masked."""
        return [
            (item.name, item.shown(getattr(self.config, item.name)), self.sources[item.name])
            for item in settings_of(type(self.config))
        ]


def load(
    cls: type[C],
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    also_known: Collection[str] = (),
) -> Loaded[C]:
    """Load the settings of `cls` from flags, environment variables and a YAML file.

    flags: values by field name or alias, as text or typed; None means not given.
    also_known: keys of other services. They are ignored, so that a cluster can share one file or environment.

    Raises ConfigError if a value is invalid (naming its source), a key is unknown (naming the nearest known
    one), or one source gives a setting under both its name and an alias.
    """
    loader = _Loader(settings_of(cls))
    known = loader.names | set(also_known)
    content = read_file(file) if file else {}
    if unknown := [key for key in content if key not in known]:
        raise ConfigError(f"{file}: unknown key {unknown[0]!r}{_nearest(unknown[0], known)}")
    loader.take_all({key: value for key, value in content.items() if key in loader.names}, lambda key: f"{file}: {key}")
    given = {name: environ[variable_of(name)] for name in loader.names if environ.get(variable_of(name))}
    loader.take_all(given, variable_of)
    if unknown := [name for name in flags if name not in loader.names]:
        raise ConfigError(f"unknown setting {unknown[0]!r}{_nearest(unknown[0], loader.names)}")
    loader.take_all({name: value for name, value in flags.items() if value is not None}, flag_of)
    warnings = (*loader.warnings, *_unknown_variables(environ, known))
    return Loaded(config=cls(**loader.values), sources=loader.sources, warnings=warnings)


class _Loader:
    """Collects values from one source after another; a later source replaces what an earlier one gave."""

    def __init__(self, items: Sequence[Setting]) -> None:
        self._items = {name: item for item in items for name in (item.name, *item.aliases)}
        self.values: dict[str, Any] = {}
        self.sources = {item.name: "default" for item in items}
        self.warnings: list[str] = []

    @property
    def names(self) -> Set[str]:
        """Names and aliases of all settings."""
        return self._items.keys()

    def take_all(self, given: Mapping[str, object], spell: Callable[[str], str]) -> None:
        """Take the values of one source, by name or alias. `spell` returns how that source writes a name."""
        names: dict[str, str] = {}
        for name, raw in given.items():
            item = self._items[name]
            if item.name in names:
                both = sorted((names[item.name], name), key=lambda each: each != item.name)
                raise ConfigError(
                    f"{spell(both[0])} and {spell(both[1])} are the same setting, and both are given; "
                    f"keep {spell(item.name)}"
                )
            names[item.name] = name
            if name != item.name:
                self._deprecate(spell(name), spell(item.name))
            self._take(item, raw, spell(name))

    def _take(self, item: Setting, raw: object, source: str) -> None:
        if isinstance(raw, str) and raw in item.value_aliases:
            self._deprecate(f"{source}: {raw}", item.value_aliases[raw])
            raw = item.value_aliases[raw]
        try:
            value = item.parse(raw) if isinstance(raw, str) else item.convert(raw)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error
        if problem := item.problem(value):
            raise ConfigError(f"{source}: {problem}")
        self.values[item.name], self.sources[item.name] = value, source

    def _deprecate(self, old: str, new: str) -> None:
        self.warnings.append(f"{old} is deprecated and will be removed in the next release; use {new}")


def read_file(file: Path) -> dict[str, Any]:
    """Read a flat mapping from a YAML file.

    Raises ConfigError if the file cannot be read, is not a flat mapping, or contains a key twice.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            content = yaml.load(stream, Loader=_NoDuplicates)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the config file {file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file}: expected `key: value` lines at the top level")
    return content


def write_private(file: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping to a YAML file atomically.

    A new file is readable by its owner only; an existing file keeps its owner and mode. Raises ConfigError if
    the file cannot be written.
    """
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            yaml.safe_dump(dict(content), stream, sort_keys=False)
            if file.exists():
                before = file.stat()
                os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                os.fchmod(stream.fileno(), stat.S_IMODE(before.st_mode))
        Path(name).replace(file)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def json_schema(*classes: type[Config]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a config file with any settings of these services.

    If several services declare a key, the first one describes it. Aliases are marked as deprecated.
    """
    properties: dict[str, Any] = {}
    for cls in classes:
        for item in settings_of(cls):
            for key, schema in {item.name: item.schema(), **item.alias_schemas()}.items():
                properties.setdefault(key, schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Baton settings",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def dump(config: Config) -> dict[str, Any]:
    """Convert settings to JSON values for another process; `restore` is the inverse."""
    return {item.name: item.plain(getattr(config, item.name)) for item in settings_of(type(config))}


def restore(cls: type[C], values: Mapping[str, Any]) -> C:
    """Rebuild settings from the result of `dump`. Raises ConfigError for an unknown name or invalid value."""
    items = {item.name: item for item in settings_of(cls)}
    if unknown := values.keys() - items.keys():
        raise ConfigError(f"unknown settings {sorted(unknown)}")
    try:
        return cls(**{name: items[name].convert(value) for name, value in values.items()})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def derive(cls: type[C], source: Config, **changes: object) -> C:
    """Build settings of `cls` from the fields that `source` shares with it, plus `changes`.

    `baton up` configures its services this way.
    """
    shared = {item.name: getattr(source, item.name) for item in settings_of(cls) if hasattr(source, item.name)}
    return cls(**{**shared, **changes})


def _kind_of(hint: Any) -> dict[str, Any]:
    """Derive `kind`, `optional` and `choices` of a `Setting` from a field's annotation."""
    optional = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        if len(inner) == 2 and typing.get_origin(inner[0]) is Literal and inner[1] is str:
            inner.pop()  # the choices and an `other_form`
        if len(inner) != 1:
            raise TypeError(f"the type of a setting must be T or T | None, not {hint}")
        optional, hint = types.NoneType in typing.get_args(hint), inner[0]
    if typing.get_origin(hint) is Literal:
        return {"kind": str, "optional": optional, "choices": typing.get_args(hint)}
    if hint == tuple[str, ...]:
        return {"kind": tuple, "optional": optional, "choices": ()}
    if hint not in (str, int, float, bool, Path):
        raise TypeError(f"a setting cannot be of type {hint}")
    return {"kind": hint, "optional": optional, "choices": ()}


def _nearest(key: str, known: Collection[str]) -> str:
    spelled = key.replace("-", "_").lower()
    near = [spelled] if spelled in known else difflib.get_close_matches(spelled, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _unknown_variables(environ: Mapping[str, str], known: Collection[str]) -> tuple[str, ...]:
    """Return a warning for each variable with Baton's prefix that is not a setting.

    It is not an error, because other programs may use variables with the same prefix.
    """
    variables = {variable_of(name) for name in known} | OTHER_VARIABLES.keys()
    return tuple(
        f"unknown environment variable {name}{_nearest_variable(name, variables)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in variables and not _SERVICE_LINK.search(name)
    )


def _nearest_variable(name: str, variables: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(variables), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class _NoDuplicates(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str):
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep=deep)
