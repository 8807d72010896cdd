"""Failures of real pipelines, run as they happen: what broke, and what the checks say."""
