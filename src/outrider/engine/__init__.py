"""The composition root and the public API."""
