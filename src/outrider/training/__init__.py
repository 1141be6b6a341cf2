"""Training of draft heads and small models: self-distillation data, one alignment, one objective per head."""
