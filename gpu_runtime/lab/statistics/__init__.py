"""
Derive figures from a report's raw numbers, and judge these figures by goals.

This package measures nothing and does not import torch.
"""
