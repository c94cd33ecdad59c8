"""Which processes exist: services as child processes, workers as Ray actors, all of them restarted within
bounds and gone when we are."""
