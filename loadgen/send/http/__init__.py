"""OpenAI's completions and chat API over HTTP/1.1: the client, its connections and its stream parser."""
