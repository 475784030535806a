"""What the scheduler actor knows of nodes that decide by themselves, from what they report."""
