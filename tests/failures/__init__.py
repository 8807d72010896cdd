"""Failures that people really had or would have, run as they happen: what broke, and what we say."""
