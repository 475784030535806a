"""What crosses processes once the node decides: chunks are called by namespace and key alone."""
