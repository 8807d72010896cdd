"""
The example logs of ``spec/logs``: valid logs recorded from scenarios, and rejected logs, which each
differ from a valid log in one place.
"""
