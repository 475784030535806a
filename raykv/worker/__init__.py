"""What runs in a vLLM worker without vLLM: its KV memory handed over, and its line to the node."""
