// In place of the toolkit's, for nccl.h, which includes it and takes nothing from it: cuda_runtime.h here says why.
#pragma once
