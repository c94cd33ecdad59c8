"""The reader's side of KV transfers: links to owners, pulls, and quarantine of reads that timed out."""
