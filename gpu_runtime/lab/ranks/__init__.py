"""Pipelines over ranks, compared with torch's own and timed."""
