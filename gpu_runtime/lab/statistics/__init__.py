"""
Numbers derived from a report's raw numbers, and the goals and text tables that show them.

Nothing here measures, and nothing imports torch.
"""
