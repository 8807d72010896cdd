"""
The event log: its format, the recorder, the reader and the replayer.
"""
