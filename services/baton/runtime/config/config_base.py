"""Settings as values: one flat frozen dataclass per service, filled from flag before variable before file
before default.

A field is declared once, with `setting(...)`; from that follow its flag (`--http-port`), its environment
variable (`BATON_HTTP_PORT`), its key in the YAML file (`http_port`), its check, its help and its JSON schema.
Nothing here knows a command-line library.
"""

import dataclasses
import difflib
import os
import re
import stat
import tempfile
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, dataclass_transform

import yaml

from baton.core.errors import ConfigError
from baton.runtime.config.setting import Setting

PREFIX = "BATON_"
OTHER_VARIABLES: Mapping[str, str] = {
    "BATON_CONFIG": "the YAML file, where --config is not given",
    "BATON_GATEWAY": "the gateway that `baton status`, `explain` and `drain` ask, where --gateway is not given",
    "BATON_GATEWAY_CA": "who signs the certificate of that gateway, where --gateway-ca is not given",
    "BATON_GATEWAY_NAME": "what the certificate of that gateway calls it, where --gateway-name is not given",
    "BATON_API_KEY": "the API key of `baton status`, `explain`, `drain` and of the first prompt of `baton up`",
    "BATON_RUN_ID": "the mark of a `baton up` on every process that it starts",
    "BATON_FAILPOINTS": "faults to inject into this process, for tests (baton.runtime.failpoints)",
    "BATON_TEST_LONG": "run the full-size form of the tests",
}
"""Variables with Baton's prefix that are no settings."""

# Kubernetes gives each pod such variables for each Service that it can see; a Service called baton-… has our
# prefix.
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
) -> T:
    """Declare a field of a `Config`.

    `unit`: what the number counts; an int in `bytes` may be written `512MiB`. `minimum` and `maximum` are
    allowed values, `above` is not. `secret`: a password may stand in it; never shown or logged.
    """
    metadata = {"help": help, "unit": unit, "minimum": minimum, "above": above, "maximum": maximum, "secret": secret}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting,))
def config(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass. Not slotted, so that services can share groups of fields by
    inheriting several of them."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@config
class Config:
    """Base of every service's settings. Rules between settings go into `__post_init__` of the class that has
    them, after `super()`'s.

    Raises ConfigError when a value is of the wrong type or out of its range.
    """

    def __post_init__(self) -> None:
        for item in settings_of(type(self)):
            problem = item.problem(getattr(self, item.name))
            if problem:
                raise ConfigError(f"{item.name}: {problem}")


def settings_of(cls: type[Config]) -> tuple[Setting, ...]:
    """What can be set in `cls`, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    return tuple(
        Setting(name=field.name, default=field.default, **_kind_of(hints[field.name]), **field.metadata)
        for field in dataclasses.fields(cls)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """A service's settings, where each value came from, and what was odd but no error (say it once the log is
    set up)."""

    config: C
    sources: Mapping[str, str]
    warnings: tuple[str, ...]

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value as one would write it, source) for `baton config`; secrets are masked."""
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
    """Read `cls` from flags (by field name; None: not given; text or typed), variables and a YAML file.

    `also_known`: keys of other services, which may stand in a file or environment that a whole cluster
    shares; they are passed over. Raises ConfigError, naming where the value came from, when one cannot be
    used, and the nearest known name when a key is unknown.
    """
    items = {item.name: item for item in settings_of(cls)}
    known = items.keys() | set(also_known)
    values: dict[str, object] = {}
    sources = dict.fromkeys(items, "default")

    def take(item: Setting, raw: object, source: str) -> None:
        try:
            value = item.parse(raw) if isinstance(raw, str) else item.convert(raw)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error
        if problem := item.problem(value):
            raise ConfigError(f"{source}: {problem}")
        values[item.name], sources[item.name] = value, source

    for key, raw in (read_file(file) if file else {}).items():
        if key not in known:
            raise ConfigError(f"{file}: unknown key {key!r}{_nearest(key, known)}")
        if key in items:
            take(items[key], raw, f"{file}: {key}")
    for item in items.values():
        if text := environ.get(item.variable):
            take(item, text, item.variable)
    for name, raw in flags.items():
        if name not in items:
            raise ConfigError(f"unknown setting {name!r}{_nearest(name, items)}")
        if raw is not None:
            take(items[name], raw, items[name].flag)
    return Loaded(config=cls(**values), sources=sources, warnings=_unknown_variables(environ, known))


def read_file(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError when it cannot be read, is no flat mapping, or has a key
    twice."""
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
    """Write a mapping as YAML, all of it or nothing. A new file is readable by its owner alone; one that is
    there stays whose it is, and readable by whom it was. Raises ConfigError when it cannot be written so."""
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            yaml.safe_dump(dict(content), stream, sort_keys=False)
            if file.exists():
                was = file.stat()
                os.fchown(stream.fileno(), was.st_uid, was.st_gid)
                os.fchmod(stream.fileno(), stat.S_IMODE(was.st_mode))
        Path(name).replace(file)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def json_schema(*classes: type[Config]) -> dict[str, Any]:
    """JSON Schema (2020-12) of a file that may hold any setting of these services; the first that declares a
    key describes it."""
    properties: dict[str, Any] = {}
    for cls in classes:
        for item in settings_of(cls):
            properties.setdefault(item.name, item.schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Baton settings",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def dump(config: Config) -> dict[str, Any]:
    """The settings as plain JSON values, to hand to another process; `restore` reads them back."""
    return {item.name: item.plain(getattr(config, item.name)) for item in settings_of(type(config))}


def restore(cls: type[C], values: Mapping[str, Any]) -> C:
    """The settings that `dump` wrote. Raises ConfigError on an unknown name or a value that cannot be
    used."""
    items = {item.name: item for item in settings_of(cls)}
    if unknown := values.keys() - items.keys():
        raise ConfigError(f"unknown settings {sorted(unknown)}")
    try:
        return cls(**{name: items[name].convert(value) for name, value in values.items()})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def derive(cls: type[C], source: Config, **changes: object) -> C:
    """Settings of `cls` with the values that `source` has under the same names, and `changes`. How `baton up`
    configures its services."""
    shared = {item.name: getattr(source, item.name) for item in settings_of(cls) if hasattr(source, item.name)}
    return cls(**{**shared, **changes})


def _kind_of(hint: Any) -> dict[str, Any]:
    """`kind`, `optional` and `choices` of a `Setting` from a field's annotation."""
    optional = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        if len(inner) != 1:
            raise TypeError(f"a setting has one type, or one type or None, not {hint}")
        optional, hint = True, inner[0]
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
    """A warning for each variable with our prefix that nobody reads. No error: other programs' variables may
    have it, too."""
    variables = {PREFIX + name.upper() for name in known} | OTHER_VARIABLES.keys()
    return tuple(
        f"unknown environment variable {name}{_nearest_variable(name, variables)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in variables and not _SERVICE_LINK.search(name)
    )


def _nearest_variable(name: str, variables: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(variables), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class _NoDuplicates(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} stands twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep=deep)
