"""Jobs of one worker: prefill legs, decode legs, prefix pulls."""
