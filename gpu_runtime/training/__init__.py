"""Training over the pipeline: what is trained, what persists of it, and how it goes on."""
