"""The laboratory: what compares, times and plots the runtime. Nothing in the product imports it."""
