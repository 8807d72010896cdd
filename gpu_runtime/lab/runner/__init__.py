"""
Running sides: processes, rounds, the device, the profiler, and host times.
"""
