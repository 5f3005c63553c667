// In place of the toolkit's, which adds what only nvcc understands to cuda_runtime_api.h, and to that end includes files of
// the folder crt/, which torch's wheels do not bring. nccl.h and c10/cuda include it for the names in cuda_runtime_api.h.
#pragma once

#include <cuda_runtime_api.h>
