"""Finding and joining Ray, actors by name, one way to ask them, breakers, processes."""
