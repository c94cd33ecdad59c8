"""The configuration page: every setting with its key, default and the services that read it."""

from baton.runtime.config.byte_sizes import format_size
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.setting import Setting
from baton.runtime.config.settings import SERVICES
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = """
A setting has one name in three spellings: the flag `--max-queued-jobs`, the environment variable
`BATON_MAX_QUEUED_JOBS` and the YAML key `max_queued_jobs` of the file that `--config` names. The flag comes before
the variable, the variable before the file, the file before the default. An unknown key or variable is an error.
`baton config` shows effective values and where each comes from.

A size may be written `512MiB`, `2GB` or as a number of bytes.
"""


def config_page() -> str:
    """One table of all settings, sorted by key."""
    settings: dict[str, Setting] = {}
    readers: dict[str, list[str]] = {}
    for service, kind in SERVICES.items():
        for setting in settings_of(kind):
            settings.setdefault(setting.name, setting)
            readers.setdefault(setting.name, []).append(service)
    rows = [
        (
            code(name),
            _kind(setting),
            code(setting.shown(setting.default)),
            setting.description,
            ", ".join(readers[name]),
        )
        for name, setting in sorted(settings.items())
    ]
    return page(
        "Configuration",
        paragraph(INTRODUCTION),
        "## Settings",
        table(("key", "type", "default", "meaning", "commands"), rows),
    )


def _kind(setting: Setting) -> str:
    if setting.choices:
        return "one of " + ", ".join(code(choice) for choice in setting.forms)
    name = "size" if setting.is_size else setting.kind.__name__.lower()
    names = {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "boolean",
        "tuple": "list",
        "posixpath": "path",
    }
    limits = (("≥", setting.minimum), (">", setting.above), ("≤", setting.maximum))
    bounds = [f"{sign} {_bound(setting, bound)}" for sign, bound in limits if bound is not None]
    return " ".join([names.get(name, name), *bounds])


def _bound(setting: Setting, bound: float) -> str:
    return format_size(int(bound)) if setting.is_size else f"{bound:g}"
