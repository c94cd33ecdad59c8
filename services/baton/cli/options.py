"""Command-line options made from settings: every flag has its key, its variable and its default in `--help`, written down once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.runtime.config import Config, Loaded, Setting, settings_of
from baton.runtime.settings import load_settings

C = TypeVar("C", bound=Config)
F = TypeVar("F", bound=Callable[..., Any])

CONFIG_FILE = "config_file"


class SettingType(click.ParamType):
    """A setting's own text form; completes its choices."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = "size" if setting.is_size else {str: "text", int: "integer", float: "number", tuple: "list"}.get(setting.kind, "path")

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

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        return [click.shell_completion.CompletionItem(c) for c in self._setting.choices if c.startswith(incomplete)]


def settings_options(cls: type[Config]) -> Callable[[F], F]:
    """Give a command one option for each setting of `cls`, and `--config FILE`. Values that were not given are None."""

    def decorate(function: F) -> F:
        for setting in reversed(settings_of(cls)):
            function = _option(setting)(function)
        return click.option(
            "--config",
            CONFIG_FILE,
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="BATON_CONFIG",
            show_envvar=True,
            help="YAML file with any of these settings as keys; a flag or a variable goes before it.",
        )(function)

    return decorate


def load_options(cls: type[C], options: dict[str, Any]) -> Loaded[C]:
    """The settings of a command from what `settings_options` passed it: flag before variable before file before default."""
    flags = {setting.name: options[setting.name] for setting in settings_of(cls)}
    return load_settings(cls, flags=flags, environ=os.environ, file=options[CONFIG_FILE])


def _option(setting: Setting) -> Callable[[F], F]:
    default = "" if setting.default is None else f" Default: {setting.shown(setting.default) or 'none'}."
    text = f"{setting.description[0].upper()}{setting.description[1:]}.{default} [{setting.variable}]"
    if setting.kind is bool:
        return click.option(f"{setting.flag}/--no-{setting.flag[2:]}", setting.name, default=None, help=text)
    return click.option(setting.flag, setting.name, type=SettingType(setting), default=None, help=text)
