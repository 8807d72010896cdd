"""Training of a decoder language model with the guarded pipeline: model, data, loop, command."""
