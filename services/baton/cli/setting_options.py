"""Builds command-line options from settings declarations."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from baton.runtime.config.config_base import Config, Loaded, settings_of
from baton.runtime.config.setting import Setting, flag_of
from baton.runtime.config.settings import load_settings

C = TypeVar("C", bound=Config)
F = TypeVar("F", bound=Callable[..., Any])

CONFIG_FILE = "config_file"
_KINDS = {str: "text", int: "integer", float: "number", tuple: "list", Path: "path"}


class SettingType(click.ParamType):
    """Parameter type that parses and validates one setting and completes its choices."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = "size" if setting.is_size else _KINDS[setting.kind]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return "|".join(self._setting.forms) or self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or value in self._setting.value_aliases:
            return value  # a deprecated choice stays as given, so that `load` can warn about it
        try:
            parsed = self._setting.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if problem := self._setting.problem(parsed):
            self.fail(problem, param, ctx)
        return parsed

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._setting.kind is Path:
            return [CompletionItem(incomplete, type="dir")]
        return [CompletionItem(choice) for choice in self._setting.choices if choice.startswith(incomplete)]


class SettingOption(click.Option):
    """Option of one setting; `section` is its heading in `--help`."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SettingsCommand(click.Command):
    """Command whose `--help` groups settings by section, starting with its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(param.section if isinstance(param, SettingOption) else "", []).append(record)
        general = sections.pop("", [])
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        with formatter.section("Options"):
            formatter.write_dl(general)


def settings_options(cls: type[Config]) -> Callable[[F], F]:
    """Decorate a command with one option per setting of `cls`, and `--config FILE`. Aliases are hidden.

    Options that were not given are None.
    """

    def decorate(function: F) -> F:
        function = click.option(
            "--config",
            CONFIG_FILE,
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="BATON_CONFIG",
            help="YAML file with these settings as keys; flags and variables take precedence. Default: none. "
            "[BATON_CONFIG]",
        )(function)
        by_name = {setting.name: setting for setting in settings_of(cls)}
        for section, name in reversed(list(_sections(cls))):
            setting = by_name[name]
            for alias in setting.aliases:
                function = _option(setting, alias, section, hidden=True)(function)
            function = _option(setting, name, section)(function)
        return function

    return decorate


def load_options(cls: type[C], options: dict[str, Any]) -> Loaded[C]:
    """Load a command's settings from its options, the environment and the config file.

    `options` are the values of the options that `settings_options` added. Raises ConfigError.
    """
    flags = {name: options[name] for setting in settings_of(cls) for name in (setting.name, *setting.aliases)}
    return load_settings(cls, flags=flags, environ=os.environ, file=options[CONFIG_FILE])


def _sections(cls: type[Config]) -> Iterable[tuple[str, str]]:
    """Yield (heading, setting name); the heading is the group that declares the setting first."""
    for group in cls.__mro__:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"(Settings|Config)$", "", group.__name__)).lower()
        for name in getattr(group, "__annotations__", {}):
            if not any(
                name in getattr(nearer, "__annotations__", {}) for nearer in cls.__mro__[: cls.__mro__.index(group)]
            ):
                yield f"{words.capitalize()} settings", name


def _option(setting: Setting, name: str, section: str, *, hidden: bool = False) -> Callable[[F], F]:
    """Option for `setting` under `name`, which is its own name or an alias."""
    default = "" if setting.default is None else setting.shown(setting.default)
    text = f"{setting.description[0].upper()}{setting.description[1:]}. Default: {default or 'unset'}. "
    text += f"[{setting.variable}]"
    flag = flag_of(name)
    names = [f"{flag}/--no-{flag[2:]}" if setting.kind is bool else flag, name]
    kind = None if setting.kind is bool else SettingType(setting)
    return click.option(*names, cls=SettingOption, section=section, type=kind, default=None, help=text, hidden=hidden)
