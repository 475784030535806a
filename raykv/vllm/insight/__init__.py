"""What clients and operators are told of a request: sources of its tokens, spans of its time."""
