"""Guards for other people's frameworks, one module each."""
