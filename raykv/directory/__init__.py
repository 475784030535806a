"""The scheduler actor: which node has which chunk, the event log, and the operators' orders."""
