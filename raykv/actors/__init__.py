"""Ray actors and the threads that talk to them: thin shells around `raykv.core`."""
