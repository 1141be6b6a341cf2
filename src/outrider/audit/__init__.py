"""Checks of losslessness that a user can run."""
