"""The owner's side of KV transfers: leases, announcements, and the service for peers that read."""
