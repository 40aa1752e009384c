"""The chat page: index.html, one static file, and nothing to import."""
