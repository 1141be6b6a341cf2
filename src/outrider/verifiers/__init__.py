"""Verification rules: pure functions from (tree, target distributions, random stream) to what may be kept."""
