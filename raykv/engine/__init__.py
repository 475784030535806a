"""What runs in EngineCore: the view of its places, chunks of other nodes, accounts, the session."""
