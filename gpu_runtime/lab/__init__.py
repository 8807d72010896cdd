"""
The measurement laboratory: code that compares, times and plots the runtime. No product code imports
this package.
"""
