"""The guard of TorchTitan's pipeline: over a stand-in, and over the real trainer."""
