"""Responses and errors of `/v1/messages`, Anthropic's API."""
