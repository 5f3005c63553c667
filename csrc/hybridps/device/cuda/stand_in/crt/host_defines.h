// The macros that cuda_runtime_api.h takes from this toolkit file, as a GNU-like host compiler sees them.
//
// Torch's wheels bring CUDA's headers without the folder crt/, and c10/cuda/CUDAStream.h needs these macros. Used only
// where the folder of CUDA's headers lacks the file (cmake/FindCudaHeaders.cmake).
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
