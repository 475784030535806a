"""What crosses processes: messages by conversation, each beside its check, and their framing."""
