"""
Evidence that F, dI and dW under guards, eager and captured, give native full backward's bits.
"""
