"""What runs in EngineCore: the view of its node, remote chunks, accounts, the exchange."""
