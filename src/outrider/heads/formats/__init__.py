"""Other projects' head files, read and written strictly: one module a family (``registry.py`` lists them)."""
