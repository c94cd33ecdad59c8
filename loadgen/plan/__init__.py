"""Plans: the requests to send, with their times and prompts."""
