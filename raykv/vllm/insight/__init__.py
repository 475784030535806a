"""What clients and operators learn of a request: sources of its tokens, spans of its time."""
