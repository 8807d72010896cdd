"""
Run and time the sides of a measurement: processes, rounds, the device, the profiler, and host
times.
"""
