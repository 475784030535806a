"""The disk tier: files of chunks, the folder, what lies there, reads and writes."""
