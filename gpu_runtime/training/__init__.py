"""Training of a decoder language model over the guarded pipeline: model, data, loop, command."""
