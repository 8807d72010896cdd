"""Failures of real pipelines, reproduced: what broke, and what the checks report."""
