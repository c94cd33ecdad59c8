"""The OpenAI API over HTTP: server, routes, and the format of responses."""
