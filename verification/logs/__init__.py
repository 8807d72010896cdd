"""
The example logs of ``spec/logs``: valid ones recorded from scenarios, rejected ones a field away.
"""
