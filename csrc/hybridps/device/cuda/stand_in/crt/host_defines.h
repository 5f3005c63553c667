// The words that cuda_runtime_api.h takes from this file of the toolkit, as a host compiler of GNU's kind sees them.
//
// Why here: torch's wheels bring CUDA's headers without the folder crt/, and c10/cuda/CUDAStream.h needs them. Taken
// only where the folder that CUDA's headers come from lacks it (cmake/FindCudaHeaders.cmake).
#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#undef __forceinline__
#define __forceinline__ __inline__ __attribute__((always_inline))
