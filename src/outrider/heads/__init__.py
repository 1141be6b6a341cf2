"""Draft networks on top of a target's hidden states: one file a method, one file format, one way of checking both."""
