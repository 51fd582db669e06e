"""What happens when a compiled graph is called: its pieces one after the other, or CUDA graphs of them."""
