"""What a key means: every fact that an engine's bytes depend on, and who reads it."""
