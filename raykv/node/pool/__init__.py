"""What one node's pool holds, who may touch it, and what goes first: decided without a thread."""
