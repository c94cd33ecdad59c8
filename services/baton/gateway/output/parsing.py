"""Creates the parser of a format."""

from dataclasses import replace

from baton.gateway.output.format_parser import FormatParser
from baton.gateway.output.formats import MessageParser, OutputFormat, ParserOptions
from baton.gateway.output.harmony_parser import HarmonyParser


def message_parser(output_format: OutputFormat, options: ParserOptions) -> MessageParser:
    """Return a new parser for one sample."""
    if output_format.template is not None:
        return output_format.template.parser(options)
    if output_format.is_harmony:
        return HarmonyParser(options if output_format.tools is not None else replace(options, parse_tools=False))
    return FormatParser(output_format, options)
