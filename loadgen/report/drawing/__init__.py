"""Figures of a report: their data, and their drawing as SVG."""
