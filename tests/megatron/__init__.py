"""The guard of Megatron-core's loops: over a stand-in, and over the real package."""
