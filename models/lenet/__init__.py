"""LeNet-5."""
