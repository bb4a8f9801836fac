"""optax transformations that spend less memory."""
