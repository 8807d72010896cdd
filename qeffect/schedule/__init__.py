"""
Pipeline schedules: tables in, actions out, and what can be said about them before anything runs.
"""
