"""What kernels run on: compiling, launching, memory, graph capture. Knows no kernel."""
