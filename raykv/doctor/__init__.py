"""What is wrong with a cluster: facts, how they are gathered, and the checks."""
