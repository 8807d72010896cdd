"""
The example logs of ``spec/logs``: valid logs recorded from scenarios, and rejected logs that differ
from these in one place.
"""
