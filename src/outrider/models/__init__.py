"""Language models behind one contract (``base.py``): our decoder, the transformers fallback and the toy."""
