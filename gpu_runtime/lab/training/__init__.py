"""Training runs side by side: loss curves, stops and restarts."""
