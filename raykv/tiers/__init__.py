"""Chunks outside of RAM: files of them, and folders of files."""
