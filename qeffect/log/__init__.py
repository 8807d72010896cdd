"""
Event logs: the format, the recorder, the reader and the replayer.
"""
