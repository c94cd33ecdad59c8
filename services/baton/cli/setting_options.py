"""Command-line options made from settings: every flag has its key, its variable and its default in `--help`,
written down once."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from baton.runtime.config.config_base import Config, Loaded, Setting, settings_of
from baton.runtime.config.settings import load_settings

C = TypeVar("C", bound=Config)
F = TypeVar("F", bound=Callable[..., Any])

CONFIG_FILE = "config_file"
_KINDS = {str: "text", int: "integer", float: "number", tuple: "list", Path: "path"}


class SettingType(click.ParamType):
    """A setting's own text form; completes its choices."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = "size" if setting.is_size else _KINDS[setting.kind]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return "|".join(self._setting.choices) or self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
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
    """An option of one setting; `section` is the heading that it stands under in `--help`."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SettingsCommand(click.Command):
    """A command whose `--help` lists its settings in sections, those of its own first and those of every
    process last."""

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
    """Give a command one option for each setting of `cls`, and `--config FILE`. Values that were not given
    are None."""

    def decorate(function: F) -> F:
        function = click.option(
            "--config",
            CONFIG_FILE,
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="BATON_CONFIG",
            help="YAML file with any of these settings as keys; a flag or a variable goes before it. Default: none. [BATON_CONFIG]",
        )(function)
        by_name = {setting.name: setting for setting in settings_of(cls)}
        for section, name in reversed(list(_sections(cls))):
            function = _option(by_name[name], section)(function)
        return function

    return decorate


def load_options(cls: type[C], options: dict[str, Any]) -> Loaded[C]:
    """The settings of a command from what `settings_options` passed it: flag before variable before file
    before default."""
    flags = {setting.name: options[setting.name] for setting in settings_of(cls)}
    return load_settings(cls, flags=flags, environ=os.environ, file=options[CONFIG_FILE])


def _sections(cls: type[Config]) -> Iterable[tuple[str, str]]:
    """(heading, setting) of every setting, under the group of settings that declares it first."""
    for group in cls.__mro__:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"(Settings|Config)$", "", group.__name__)).lower()
        for name in getattr(group, "__annotations__", {}):
            if not any(
                name in getattr(nearer, "__annotations__", {}) for nearer in cls.__mro__[: cls.__mro__.index(group)]
            ):
                yield f"{words.capitalize()} settings", name


def _option(setting: Setting, section: str) -> Callable[[F], F]:
    default = "none" if setting.default is None else setting.shown(setting.default) or "none"
    text = f"{setting.description[0].upper()}{setting.description[1:]}. Default: {default}. [{setting.variable}]"
    names = [f"{setting.flag}/--no-{setting.flag[2:]}" if setting.kind is bool else setting.flag, setting.name]
    kind = None if setting.kind is bool else SettingType(setting)
    return click.option(*names, cls=SettingOption, section=section, type=kind, default=None, help=text)
