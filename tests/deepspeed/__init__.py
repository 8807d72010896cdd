"""The guard of DeepSpeed's pipeline engine: over a stand-in, and over the real engine."""
