"""What a NodeActor says to people of its pool and its engines; nothing is decided by it."""
