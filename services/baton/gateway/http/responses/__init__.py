"""Responses of `/v1/responses`, OpenAI's API for responses."""
