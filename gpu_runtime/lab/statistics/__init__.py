"""
Numbers derived from a report's raw numbers, and their goals.

This package measures nothing and does not import torch.
"""
