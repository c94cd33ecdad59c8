"""Runs workers as Ray actors: cluster connection, node selection, actor placement and restarts."""
