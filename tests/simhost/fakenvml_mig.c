/* SPDX-License-Identifier: Apache-2.0 */
/* The fake NVML's entry points about MIG. */
#include <stddef.h>

#include "fakenvml.h"

EXPORT nvml_return nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    REQUIRE(handle);
    if (as_mig(handle))
        return INVALID_ARGUMENT;
    *current = gpu_behind(handle)->mig_mode;
    *pending = gpu_behind(handle)->mig_pending < 0 ? *current
                                                   : (unsigned)gpu_behind(handle)->mig_pending;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    REQUIRE(handle);
    *count = MAX_MIGS;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **out)
{
    struct mig *mig;

    REQUIRE(handle);
    if (as_mig(handle) || index >= MAX_MIGS)
        return INVALID_ARGUMENT;
    mig = &gpu_behind(handle)->migs[index];
    if (mig->kind != MIG)
        return NOT_FOUND;
    *out = mig;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_mig)
{
    REQUIRE(handle);
    *is_mig = as_mig(handle) != NULL;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out)
{
    REQUIRE(handle);
    if (!as_mig(handle))
        return INVALID_ARGUMENT;
    *out = gpu_behind(handle);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id)
{
    REQUIRE(handle);
    if (!as_mig(handle))
        return INVALID_ARGUMENT;
    *id = as_mig(handle)->gpu_instance;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id)
{
    REQUIRE(handle);
    if (!as_mig(handle))
        return INVALID_ARGUMENT;
    *id = as_mig(handle)->compute_instance;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetAttributes_v2(void *handle, struct attributes *out)
{
    struct mig *mig = as_mig(handle);

    REQUIRE(handle);
    if (!mig)
        return INVALID_ARGUMENT;
    *out = mig->attributes;
    return SUCCESS;
}

OLDER(nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2, void *handle, struct attributes *out);

/* nvmlGpuInstanceInfo_t */
struct instance_info {
    void *device;
    unsigned id;
    unsigned profile;
    unsigned start;
    unsigned size;
};

/* fakenvml_migwrite.c: the GPU instances that are lines of their own */
int written_instance_info(void *handle, struct instance_info *out);
void *written_instance(int gpu, unsigned id);
int is_pointer(const void *handle);

/* The handle of a GPU instance without a line of its own is that of its first MIG device. */
EXPORT nvml_return nvmlDeviceGetGpuInstanceById(void *handle, unsigned id, void **out)
{
    struct gpu *gpu;

    REQUIRE(handle);
    if (as_mig(handle))
        return INVALID_ARGUMENT;
    gpu = gpu_behind(handle);
    *out = written_instance(gpu->index, id);
    if (*out)
        return SUCCESS;
    for (int i = 0; i < MAX_MIGS; i++) {
        if (gpu->migs[i].kind == MIG && gpu->migs[i].gpu_instance == (int)id) {
            *out = &gpu->migs[i];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

EXPORT nvml_return nvmlGpuInstanceGetInfo(void *instance, struct instance_info *out)
{
    const struct mig *mig;

    REQUIRE_INIT();
    if (written_instance_info(instance, out))
        return SUCCESS;
    if (!is_pointer(instance))
        return INVALID_ARGUMENT;
    REQUIRE_(usable(__func__, instance));
    mig = as_mig(instance);
    if (!mig)
        return INVALID_ARGUMENT;
    out->device = mig->parent;
    out->id = (unsigned)mig->gpu_instance;
    out->profile = mig->profile;
    out->start = mig->start;
    out->size = mig->size;
    return SUCCESS;
}

/* nvmlGpuInstanceProfileInfo_t */
struct profile_info {
    unsigned id;
    unsigned is_p2p_supported;
    unsigned slices;
    unsigned instances;
    unsigned multiprocessors;
    unsigned copy_engines;
    unsigned decoders;
    unsigned encoders;
    unsigned jpegs;
    unsigned ofas;
    unsigned long long mem_mib;
};

/* The profiles of a GPU with seven compute and eight memory slices, by NVML_GPU_INSTANCE_PROFILE_*. */
static const struct {
    unsigned profile;
    unsigned id;
    unsigned slices;
    unsigned instances;
    unsigned memory_slices;
} profiles[] = {
    {0, 19, 1, 7, 1}, {1, 14, 2, 3, 2}, {2, 9, 3, 2, 4}, {3, 5, 4, 1, 4},
    {4, 0, 7, 1, 8},  {7, 20, 1, 1, 1}, {9, 15, 1, 4, 2},
};

EXPORT nvml_return nvmlDeviceGetGpuInstanceProfileInfo(void *handle, unsigned profile,
                                                       struct profile_info *out)
{
    REQUIRE(handle);
    if (as_mig(handle))
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        if (profiles[i].profile == profile) {
            *out = (struct profile_info){
                .id = profiles[i].id,
                .slices = profiles[i].slices,
                .instances = profiles[i].instances,
                .multiprocessors = 16 * profiles[i].slices,
                .copy_engines = profiles[i].slices,
                .mem_mib = gpu_behind(handle)->mem_mib * profiles[i].memory_slices / 8,
            };
            return SUCCESS;
        }
    }
    return NOT_SUPPORTED;
}
