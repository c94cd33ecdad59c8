"""Creates the parser of a format."""

from dataclasses import replace

from baton.gateway.output.builtin_formats import HARMONY_ANALYSIS
from baton.gateway.output.format_parser import FormatParser
from baton.gateway.output.formats import CallLayout, MessageParser, OutputFormat, ParserOptions
from baton.gateway.output.harmony_parser import HarmonyParser


def message_parser(output_format: OutputFormat, options: ParserOptions) -> MessageParser:
    """Return a new parser for one sample."""
    if output_format.template is not None:
        return output_format.template.parser(options)
    tools, reasoning = output_format.tools, output_format.reasoning
    is_harmony = tools is not None and tools.layout is CallLayout.HARMONY
    if is_harmony or reasoning is HARMONY_ANALYSIS:
        return HarmonyParser(options if is_harmony else replace(options, parse_tools=False))
    return FormatParser(output_format, options)
