"""AlexNet."""
