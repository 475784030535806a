"""The event stream: replay, descriptions of chunks, vLLM's wire format, the publisher."""
