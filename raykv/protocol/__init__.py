"""What crosses processes: messages by conversation, each with its checks, and their framing."""
