"""Values of arguments: their types by a JSON schema, and their JSON text."""
