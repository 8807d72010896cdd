"""Guards for other people's frameworks, one public module each; `pipelining` is the first."""
