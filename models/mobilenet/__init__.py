"""MobileNetV1."""
