"""What an engine believes of the nodes that its ranks are on."""
