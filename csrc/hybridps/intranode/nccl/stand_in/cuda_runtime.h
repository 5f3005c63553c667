// In place of the toolkit's, for nccl.h: all that it takes from there is the name of a stream. The real one includes
// crt/host_config.h, which torch's wheels do not bring.
#pragma once

typedef struct CUstream_st* cudaStream_t;
