"""What only the Python Array API standard (2025.12) asks for: `linalg`, `fft` and its names."""
