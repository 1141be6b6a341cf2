"""One file a head: how it is trained."""
