"""Models, written as flax nnx modules and used as pure functions of a parameter tree."""
