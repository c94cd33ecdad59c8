"""Request bodies of other APIs, translated to the fields of `/v1/chat/completions`."""
