"""What runs in EngineCore: the view of its places, chunks of other nodes, accounts, what is said and heard."""
