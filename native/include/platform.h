// Which GPU platform this build is for. Exactly one of the three macros is given by the build.
#pragma once

#if defined(MONARCH_PLATFORM_ROCM)
#define MONARCH_PLATFORM_NAME "rocm"
#elif defined(MONARCH_PLATFORM_CUDA)
#define MONARCH_PLATFORM_NAME "cuda"
#elif defined(MONARCH_PLATFORM_NONE)
#define MONARCH_PLATFORM_NAME "none"
#else
#error "define MONARCH_PLATFORM_ROCM, MONARCH_PLATFORM_CUDA or MONARCH_PLATFORM_NONE"
#endif

#if defined(MONARCH_PLATFORM_ROCM)
#define MONARCH_GPU_SYMBOL(cuda, hip) hip
#else
#define MONARCH_GPU_SYMBOL(cuda, hip) cuda
#endif
