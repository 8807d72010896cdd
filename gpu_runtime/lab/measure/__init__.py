"""
Measuring: the device, reports, tables and pictures that benchmarks and evidence share.
"""
