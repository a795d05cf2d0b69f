// Programmatic dependent launch: a kernel begins before the stream's last kernel has ended.

#ifdef __CUDA_ARCH__
// The stream's next kernel may start, and wait for this one; this one waits for the last. Nothing
// before Hopper.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif
