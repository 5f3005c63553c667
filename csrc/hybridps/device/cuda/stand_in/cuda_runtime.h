// Replaces the toolkit's file, which adds to cuda_runtime_api.h what only nvcc understands. For this the toolkit's file
// includes the folder crt/, which torch's wheels lack. nccl.h and c10/cuda need only the names of cuda_runtime_api.h.
#pragma once

#include <cuda_runtime_api.h>
