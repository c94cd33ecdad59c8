"""Network basics: addresses, TLS files, in-process transport and membership announcements."""
