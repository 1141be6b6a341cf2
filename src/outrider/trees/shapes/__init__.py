"""Tree shapes: which guesses are worth a slot. A shape asks a ``ChildSource`` for distributions and grows the tree."""
