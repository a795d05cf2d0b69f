// Programmatic dependent launch: a kernel starts before the previous kernel of its stream has
// ended. Until it has waited it touches no global memory. What it reads is not `const
// __restrict__`: loads of such memory (ld.global.nc) need not see what was written while the kernel
// waited.

#ifdef __CUDA_ARCH__
// The first lets the stream's next kernel start, the second waits for the previous kernel. Both do
// nothing before Hopper.
DEVICE void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif
