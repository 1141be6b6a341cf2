"""From logits to tokens: the user's parameters, the one logits pipeline, and counter-based random draws."""
