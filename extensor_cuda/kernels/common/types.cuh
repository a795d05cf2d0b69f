// Integer types named by their width, for every kernel.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A function of the device that is always inlined.
#define DEVICE __device__ __forceinline__
