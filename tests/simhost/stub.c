/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every driver library of the simulated host but NVML: a real ELF object with the real one's name,
 * SONAME and needed libraries, and next to nothing inside.  The build defines STUB_NAME, and
 * STUB_CUDA_VERSION for libcuda.
 */
#define EXPORT __attribute__((visibility("default")))

/* Tells a test which library answered a lookup. */
EXPORT const char *simhost_library(void)
{
    return STUB_NAME;
}

#ifdef STUB_CUDA_VERSION
EXPORT int cuInit(unsigned flags)
{
    (void)flags;
    return 0; /* CUDA_SUCCESS */
}

EXPORT int cuDriverGetVersion(int *version)
{
    *version = STUB_CUDA_VERSION;
    return 0;
}
#endif
