"""Draft sources: one file each. They guess; they never decide."""
